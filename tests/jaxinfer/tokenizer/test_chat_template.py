import datetime

import pytest
import tokenizers

from jaxinfer.tokenizer import Tokenizer
from jaxinfer.tokenizer.chat_template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]


def render(source, messages=HI, **options):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(
        messages, **({"tools": None, "add_generation_prompt": False} | options)
    )


def test_rendering_equals_transformers(golden_directory, golden):
    tokenizer = Tokenizer.from_directory(golden_directory / "hf_directory")
    case = golden("hf_directory_golden.json")
    assert [tokenizer.apply_chat_template(**chat) for chat in case["chats"]] == case["rendered"]


def test_a_rendered_chat_is_encoded_with_one_bos(golden_directory):
    tokenizer = Tokenizer.from_directory(golden_directory / "hf_directory")
    ids = tokenizer.encode(tokenizer.apply_chat_template(HI))
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_smollm2_template(golden):
    tokenizer = Tokenizer.from_gguf(golden("smollm2.json")["metadata"])
    assert tokenizer.apply_chat_template([{"role": "system", "content": "S"}, *HI]) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_templates_may_use():
    assert render("{{ bos_token }}{{ messages[0].content }}{{ extra }}", extra="!") == "<s>Hi!"
    assert render("{{ {'a': '<\u00e9>'} | tojson }}") == '{"a": "<\u00e9>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{%- generation %}a{% endgeneration %}b") == "ab"
    assert render("a\n    {% if true %}\nb\n    {% endif %}\n") == "a\nb\n"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_templates_run_in_a_sandbox():
    with pytest.raises(ValueError, match="unsafe"):
        render("{{ ''.__class__.__mro__ }}")
    messages = [dict(HI[0])]
    with pytest.raises(ValueError, match="chat template"):
        render("{{ messages.append(1) }}", messages)
    assert messages == HI


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("Hi", "messages must be a list such as .*got str"),
        ({"role": "user"}, "messages must be a list such as .*got dict"),
        ([], "messages is empty"),
        ([*HI, "Hi"], r"messages\[1\] must be a dict with 'role' and 'content', got 'Hi'"),
        ([*HI, {"content": "x"}], r"messages\[1\]\['role'\] must be a string such as 'user', got None"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] must be a string or a list of parts .*got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] .*got 3"),
    ],
)
def test_messages_of_a_wrong_form_are_named(messages, match):
    with pytest.raises(ValueError, match=match):
        render("x", messages)


def test_tool_calls_need_no_content():
    assert render("x", [{"role": "assistant", "tool_calls": [{}]}]) == "x"


def test_tools_of_a_wrong_form_are_named():
    with pytest.raises(ValueError, match=r"tools\[0\] must be the JSON schema"):
        render("x", tools=[print])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused the conversation: roles must alternate"),
        ("{% if %}", "not valid jinja2, line 1"),
        ("{{ none + 'a' }}", "failed on this conversation: unsupported operand"),
        ("{{ missing.field }}", "failed on this conversation: 'missing' is undefined"),
    ],
)
def test_errors_of_the_template_are_value_errors(source, match):
    with pytest.raises(ValueError, match=match):
        render(source)


def test_without_a_template_the_error_says_what_to_do():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    with pytest.raises(ValueError, match=r"no chat template: generate from plain text, or .*chat_template="):
        Tokenizer(backend).apply_chat_template(HI)
