"""The API as OpenAI's own client and plain HTTP see it, against what the engine answers offline."""

import dataclasses
import json
import typing

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from jaxinfer.sampling.params import SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 12}
ON = {"ignore_eos": True}  # what OpenAI's client does not know
HI = [{"role": "user", "content": "hi"}]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def offline(llm):
    """Text, token ids and log-probabilities of a prompt, from the offline engine."""

    def run(prompt, **options):
        params = dataclasses.replace(PARAMS, **options)
        return llm.generate(prompt, params)[0]

    return run


def chat_text(llm, messages=HI):
    return llm.tokenizer.apply_chat_template(messages)


def test_a_chat_equals_the_offline_answer_whole_and_streamed(client, offline, llm):
    messages = [{"role": "user", "content": "How do you do, and where?"}]
    wanted = offline(chat_text(llm, messages))
    options = {"model": "tiny", "messages": messages, "extra_body": ON | {"cache_salt": "chat"}, **GREEDY}
    whole = client.chat.completions.create(**options)
    [choice] = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.outputs[0].text)
    assert choice.finish_reason == "length"
    assert (whole.object, whole.model) == ("chat.completion", "tiny")
    assert whole.usage.prompt_tokens == len(wanted.prompt_token_ids)  # no BOS beside the template's
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (12, len(wanted.prompt_token_ids) + 12)
    pages = (len(wanted.prompt_token_ids) - 1) // 16
    assert client.chat.completions.create(**options).usage.prompt_tokens_details.cached_tokens == pages * 16 > 0
    events = list(
        client.chat.completions.create(
            **options | {"extra_body": ON | {"cache_salt": "another"}},
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events[:-1]) == wanted.outputs[0].text
    assert [e.choices[0].finish_reason for e in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert (events[-1].choices, events[-1].usage) == ([], whole.usage)
    assert all(e.usage is None for e in events[:-1])
    assert {e.id for e in events} == {events[0].id}


def test_completions_take_one_prompt_or_several_as_text_or_ids(client, offline, llm):
    texts = ["hello", "once upon"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    wanted = [offline(text).outputs[0].text for text in texts]
    for prompt, expected in ((texts[0], wanted[:1]), (ids[0], wanted[:1]), (texts, wanted), (ids, wanted)):
        answer = client.completions.create(model="tiny", prompt=prompt, **GREEDY, extra_body=ON)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        parts = [""] * len(expected)
        for event in client.completions.create(model="tiny", prompt=prompt, **GREEDY, extra_body=ON, stream=True):
            parts[event.choices[0].index] += event.choices[0].text
        assert parts == expected
    assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert answer.usage.completion_tokens == 24


def test_n_completions_of_several_prompts_are_numbered_prompt_by_prompt(client, offline):
    prompts = ["hello", "once upon"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=3, seed=5, temperature=1.0, max_tokens=6, extra_body=ON
    )
    wanted = [output.text for p in prompts for output in offline(p, n=3, seed=5, temperature=1.0, max_tokens=6).outputs]
    assert [choice.text for choice in answer.choices] == wanted
    assert len(set(wanted)) > 2


def test_the_best_of_several_completions(client, http, offline):
    prompts, options = ["hello", "once upon"], {"n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 6}
    answer = client.completions.create(model="tiny", prompt=prompts, best_of=4, **options, extra_body=ON)
    wanted = [output.text for prompt in prompts for output in offline(prompt, **options | {"best_of": 4}).outputs]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 2 * 4 * 6  # those that are not returned have been paid for too
    for more, message in (
        ({"best_of": 1}, "best_of must be at least 2, got 1"),
        ({"best_of": 3, "stream": True}, "best_of cannot be streamed"),
        ({"best_of": 129}, "best_of must be at most 128, got 129"),
        ({"best_of": 3, "temperature": 0}, "best_of needs a temperature above 0"),
    ):
        error = error_of(http.post("/v1/completions", json={"prompt": "x"} | options | more), 400)
        assert (error["param"], message in error["message"]) == ("best_of", True)


def test_every_sampling_field_reaches_the_engine(client, offline):
    ours = {
        "top_k": 30, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [77], "bad_words": ["zz"], "allowed_token_ids": list(range(3, 300)),
        "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    theirs = {
        "temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.2, "seed": 7,
        "max_tokens": 20, "stop": ["qq", "x"], "logit_bias": {"40": 2, "41": -50.5},
    }  # fmt: skip
    answer = client.completions.create(model="tiny", prompt="hello", **theirs, extra_body=ours | {"priority": -1})
    bias = {int(token): value for token, value in theirs["logit_bias"].items()}
    assert answer.choices[0].text == offline("hello", **theirs | ours | {"logit_bias": bias}).outputs[0].text


def test_a_stop_string_ends_the_answer_and_says_so(client, offline):
    whole = offline("hello").outputs[0].text
    stop = whole[4:6]
    answer = client.completions.create(model="tiny", prompt="hello", stop=stop, **GREEDY, extra_body=ON)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_chat_logprobs_equal_the_engines(client, offline, llm):
    wanted = offline(chat_text(llm), logprobs=3).outputs[0]
    options = {"model": "tiny", "messages": HI, "logprobs": True, "top_logprobs": 3, "extra_body": ON, **GREEDY}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = [
        entry
        for event in client.chat.completions.create(**options, stream=True)
        if event.choices[0].logprobs
        for entry in event.choices[0].logprobs.content
    ]
    assert [bytes(entry.bytes) for entry in whole] == [llm.tokenizer.token_bytes(t) for t in wanted.token_ids]
    for entry, again, scores, token in zip(whole, streamed, wanted.logprobs, wanted.token_ids, strict=True):
        assert entry.logprob == pytest.approx(again.logprob, abs=1e-4)
        assert entry.logprob == pytest.approx(scores[token].logprob, abs=1e-4)
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(max(s.logprob for s in scores.values()), abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_and_its_logprobs_in_front(client, offline, llm, stream):
    wanted = offline("hello you", logprobs=2, prompt_logprobs=2)
    options = {"model": "tiny", "prompt": "hello you", "echo": True, "logprobs": 2, "extra_body": ON, **GREEDY}
    if stream:
        choices = [event.choices[0] for event in client.completions.create(**options, stream=True)]
    else:
        choices = client.completions.create(**options).choices
    text = "".join(choice.text for choice in choices)
    assert text == "hello you" + wanted.outputs[0].text
    columns = {
        name: [value for choice in choices for value in getattr(choice.logprobs, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    ids = wanted.prompt_token_ids + wanted.outputs[0].token_ids
    assert {len(column) for column in columns.values()} == {len(ids)}
    assert columns["token_logprobs"][0] is None
    entries = [*wanted.prompt_logprobs, *wanted.outputs[0].logprobs]
    for token, entry, got in list(zip(ids, entries, columns["token_logprobs"]))[1:]:
        assert got == pytest.approx(entry[token].logprob, abs=1e-4)
    for name, offset in zip(columns["tokens"], columns["text_offset"]):
        begins = text[offset:].lstrip("\ufffd").startswith(name)  # bytes of no character become one with the next token
        assert name.startswith(("bytes:", "<|")) or begins


def test_streamed_text_equals_the_whole_at_every_token_boundary(client, llm):
    """Characters of one to four bytes, cut anywhere: the bias lets the model write nothing but this text's tokens."""
    for text in ("a🙂b", "你好", "e\u0301", "👩\u200d👩\u200d👧"):
        tokens = llm.tokenizer.encode(text)
        assert len(tokens) > len(text)  # characters are cut
        for cut in range(1, len(tokens)):
            options = {"model": "tiny", "prompt": tokens[:cut], "max_tokens": 7, "seed": cut}
            extra = {"allowed_token_ids": tokens, "ignore_eos": True}
            whole = client.completions.create(**options, extra_body=extra)
            events = client.completions.create(**options, extra_body=extra, stream=True)
            assert "".join(event.choices[0].text for event in events) == whole.choices[0].text


def test_models_tokenize_version_and_health(client, http, llm):
    [model] = client.models.list().data
    assert (model.id, client.models.retrieve("tiny").id, model.to_dict()["max_model_len"]) == ("tiny", "tiny", 96)
    tokens = http.post("/tokenize", json={"prompt": "hello <|im_end|>"}).json()
    assert tokens["tokens"] == llm.tokenizer.encode("hello <|im_end|>")
    assert tokens["count"] == len(tokens["tokens"])
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "hello <|im_end|>"}
    assert http.post("/tokenize", json={"messages": HI}).json()["tokens"] == llm.tokenizer.encode(chat_text(llm))
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"]
    assert http.get("/openapi.json").json()["paths"]["/v1/chat/completions"]


def error_of(response, status):
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


BAD = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e400}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop": 3}, "stop"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
    ({"priority": 2**40}, "priority"),
    ({"temprature": 1}, "temprature"),
    ({"\ud800": 1}, "\ud800"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: ascii(value)[:40])
def test_a_bad_field_is_refused_by_name(http, fields, param):
    for path, rest in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": HI})):
        body = json.dumps(rest | {"model": "tiny", "max_tokens": 4} | fields).encode()
        error = error_of(http.post(path, content=body, headers={"Content-Type": "application/json"}), 400)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([HI[0], {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": "x", "name": "Bob"}], "messages[0].name"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
    ids=str,
)
def test_a_bad_message_is_refused_by_its_place(http, messages, param):
    body = json.dumps({"messages": messages}).encode()
    response = http.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert error_of(response, 400)["param"] == param


def test_text_parts_roles_and_template_variables_are_understood(client, offline, llm):
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "a\nb"}]
    extra = ON | {"chat_template_kwargs": {"enable_thinking": False}, "store": False, "tools": []}
    answer = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_completion_tokens=6, extra_body=extra
    )
    assert answer.choices[0].message.content == offline(chat_text(llm, plain), max_tokens=6).outputs[0].text
    with pytest.raises(openai.BadRequestError, match="must not hold 'messages'"):
        client.chat.completions.create(
            model="tiny", messages=messages, extra_body={"chat_template_kwargs": {"messages": []}}
        )


@pytest.mark.parametrize(
    ("path", "schema", "rest"),
    [
        ("/v1/chat/completions", chat_create_params.CompletionCreateParamsStreaming, {"messages": HI}),
        ("/v1/completions", completion_create_params.CompletionCreateParamsStreaming, {"prompt": "hi"}),
    ],
)
def test_no_field_of_openais_client_is_ignored(http, path, schema, rest):
    """Each is in our schema, and so implemented, or is refused by name; null is as good as absent."""
    names = set(typing.get_type_hints(schema))
    components = http.get("/openapi.json").json()["components"]["schemas"]
    ours = components["ChatBody" if "chat" in path else "CompletionBody"]["properties"]
    assert len(names) > 15
    assert {"temperature", "logit_bias", "seed", "stop", "stream_options", "user", "model"} <= set(ours)
    for name in names - set(ours):
        body = rest | {"max_tokens": 1, name: {"type": "a value that nothing offers"}}
        assert error_of(http.post(path, json=body), 400)["param"] == name
        assert error_of(http.post(path, json=body), 400)["code"] == "unsupported_parameter"
    nothing = rest | {"max_tokens": 1} | dict.fromkeys(names - {"messages", "prompt", "max_tokens"})
    assert http.post(path, json=nothing).status_code == 200


def test_other_errors_have_openais_shape(client, http):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=HI)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not offered"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError, match="/v1/responses is not offered"):
        client.responses.create(model="tiny", input="x")
    with pytest.raises(openai.BadRequestError, match="with at least one new token the limit is 96"):
        client.completions.create(model="tiny", prompt="word " * 200)
    json_type = {"Content-Type": "application/json"}
    assert "there is no /nothing" in error_of(http.get("/nothing"), 404)["message"]
    assert "does not take GET" in error_of(http.get("/v1/completions"), 405)["message"]
    for body in (b"{", b'{"prompt": ', b"[" * 100_000, b"\xff\xfe", b"[]", b'"x"', b"", b"1" * 5000):
        error_of(http.post("/v1/completions", content=body, headers=json_type), 400)
    form = {"Content-Type": "text/plain"}  # what a web page may send to anybody without being asked
    error_of(http.post("/v1/completions", content=b'{"prompt": "x"}', headers=form), 400)
    for prompt in (None, [], [[]], ["a", 3], [True], 3, [["a"]], [-1], [320]):
        assert error_of(http.post("/v1/completions", json={"prompt": prompt}), 400)["param"] == "prompt"
    assert error_of(http.post("/detokenize", json={"tokens": [320]}), 400)["param"] == "tokens"
    assert error_of(http.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert error_of(http.post("/v1/chat/completions", json={}), 400)["param"] == "messages"
    assert http.get("/health").headers["x-request-id"]


def test_metrics_count_what_was_served(live, http):
    def value(line):
        text = http.get("/metrics").text
        return float(next(row.split()[-1] for row in text.splitlines() if row.startswith(line)))

    model = '{model_name="tiny"}'
    names = ("generation_tokens_total", "prompt_tokens_total", "e2e_request_latency_seconds_count",
             "time_to_first_token_seconds_count", "inter_token_latency_seconds_count",
             "request_time_per_output_token_seconds_count", "request_queue_time_seconds_count")  # fmt: skip
    before = {name: value(f"jaxinfer_{name}{model}") for name in names}
    body = {"prompt": [3, 4, 5], "max_tokens": 9, "n": 2, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200
    live.wait_idle()
    grown = {name: value(f"jaxinfer_{name}{model}") - before[name] for name in names}
    assert list(grown.values()) == [18, 3, 2, 2, 16, 2, 2]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
                 "compilations_after_warmup_total"):  # fmt: skip
        assert value(f"jaxinfer_{name}{model}") == 0
    assert value("jaxinfer_engine_steps_total") > 3
    assert value('jaxinfer_http_requests_total{path="/v1/completions",status="200"}') > 0
    assert value('jaxinfer_request_success_total{finished_reason="length",model_name="tiny"}') > 1
