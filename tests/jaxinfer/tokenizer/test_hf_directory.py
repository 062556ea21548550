import json
import shutil

import pytest

from jaxinfer.tokenizer import Tokenizer


@pytest.fixture
def directory(golden_directory, tmp_path):
    """A copy of a directory that transformers wrote."""
    return shutil.copytree(golden_directory / "hf_directory", tmp_path / "model")


def edit(path, **changes):
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (value | changes).items() if v is not None}))


def test_ids_equal_transformers(directory, golden, texts):
    tokenizer = Tokenizer.from_directory(directory)
    bos = tokenizer.bos_token_id
    for text, want in zip(texts, golden("hf_directory_golden.json")["ids"], strict=True):
        if want[:2] == [bos, bos]:  # transformers adds a second BOS, we do not
            want = want[1:]
        assert tokenizer.encode(text) == want


def test_special_ids(directory):
    tokenizer = Tokenizer.from_directory(str(directory))
    assert tokenizer.id_to_token(tokenizer.bos_token_id) == "<|endoftext|>"
    assert [tokenizer.id_to_token(i) for i in tokenizer.eos_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    edit(directory / "generation_config.json", eos_token_id=tokenizer.bos_token_id)
    assert Tokenizer.from_directory(directory).eos_token_ids == tokenizer.eos_token_ids
    (directory / "generation_config.json").unlink()
    assert Tokenizer.from_directory(directory).eos_token_ids == tokenizer.eos_token_ids[:1]
    edit(directory / "config.json", eos_token_id=5)
    assert Tokenizer.from_directory(directory).eos_token_ids == (tokenizer.eos_token_ids[0], 5)


def test_special_tokens_may_be_objects_or_in_their_own_file(directory):
    edit(directory / "tokenizer_config.json", bos_token=None, eos_token=None)
    edit(directory / "special_tokens_map.json", bos_token={"content": "<|im_start|>"}, eos_token="<|im_end|>")
    edit(directory / "tokenizer_config.json", add_bos_token=True)
    edit(directory / "tokenizer.json", post_processor=None)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.id_to_token(tokenizer.encode("a")[0]) == "<|im_start|>"


def test_the_config_overrules_the_post_processor(directory):
    edit(directory / "tokenizer_config.json", add_bos_token=False, add_eos_token=True)
    tokenizer = Tokenizer.from_directory(directory)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("a")] == ["a", "<|im_end|>"]


def test_saved_truncation_and_padding_are_switched_off(directory):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "a"}
    plain = Tokenizer.from_directory(directory).encode("Hello world, hello world")
    edit(directory / "tokenizer.json", truncation=truncation, padding=padding)
    assert Tokenizer.from_directory(directory).encode("Hello world, hello world") == plain


def test_chat_template_sources(directory):
    config = directory / "tokenizer_config.json"
    from_file = Tokenizer.from_directory(directory).chat_template
    assert "raise_exception" in from_file
    edit(config, chat_template="from the config")
    assert Tokenizer.from_directory(directory).chat_template == from_file
    (directory / "chat_template.jinja").unlink()
    assert Tokenizer.from_directory(directory).chat_template == "from the config"
    edit(config, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}])
    assert Tokenizer.from_directory(directory).chat_template == "d"
    edit(config, chat_template=None)
    assert Tokenizer.from_directory(directory).chat_template is None


def test_bad_directories_are_refused(directory):
    edit(directory / "tokenizer_config.json", bos_token="<nope>")
    with pytest.raises(ValueError, match=r"bos_token '<nope>' .* is not in tokenizer.json"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        Tokenizer.from_directory(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer.json in .*model"):
        Tokenizer.from_directory(directory)


def test_other_added_tokens_are_refused(directory):
    edit(directory / "tokenizer_config.json", bos_token="<|im_start|>")
    with pytest.raises(ValueError, match=r"adds \['<\|endoftext\|>'\] around every text"):
        Tokenizer.from_directory(directory)


def test_unsupported_decoders_are_refused(directory):
    edit(directory / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ValueError, match=r"unsupported tokenizer decoder \['WordPiece'\]"):
        Tokenizer.from_directory(directory)
