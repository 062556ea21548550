import unicodedata

import pytest

from jaxinfer.tokenizer import Tokenizer

BYTE_LEVEL = ["smollm", "gpt-2", "llama-bpe", "qwen2", "qwen35", "command-r", "tekken", "gpt-4o"]


@pytest.fixture(scope="module")
def metadata(golden):
    return golden("bpe_llama-bpe.json")["metadata"]


@pytest.mark.parametrize("name", [*(f"bpe_{pre}" for pre in BYTE_LEVEL), "sentencepiece"])
def test_ids_equal_the_reference_tokenizer(name, golden, texts):
    case = golden(f"{name}.json")
    tokenizer = Tokenizer.from_gguf(case["metadata"])
    wrong = [
        (text, want, got)
        for text, want in zip(texts, case["ids"], strict=True)
        if (got := tokenizer.encode(text, add_special_tokens=False)) != want
    ]
    assert not wrong


def test_the_word_splitters_can_be_told_apart(golden, texts):
    # Otherwise the test above would pass with any of them.
    cases = {pre: golden(f"bpe_{pre}.json") for pre in BYTE_LEVEL}
    for pre, case in cases.items():
        for other in BYTE_LEVEL:
            tokenizer = Tokenizer.from_gguf(case["metadata"] | {"tokenizer.ggml.pre": other})
            ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
            assert (ids == case["ids"]) == (other == pre), (pre, other)


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_decoding_gives_the_text_back(pre, golden, texts):
    tokenizer = Tokenizer.from_gguf(golden(f"bpe_{pre}.json")["metadata"])
    composes = pre in ("qwen2", "qwen35", "command-r")
    for text in texts:
        ids = tokenizer.encode(text)
        want = unicodedata.normalize("NFC", text) if composes else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == want


def test_sentencepiece_decoding_gives_the_text_back(sentencepiece_like, texts):
    for text in texts:
        if "<s>" not in text:  # the text after a control token gains a space, as in Llama's own tokenizer
            # A lower block itself stands for a space in this kind of vocabulary.
            assert sentencepiece_like.decode(sentencepiece_like.encode(text)) == text.replace("\u2581", " ")


def test_control_tokens_are_special_and_user_defined_ones_are_not(byte_level):
    ids = byte_level.encode("<|im_start|>a<tool_call>b")
    assert [byte_level.id_to_token(i) for i in ids] == ["<|im_start|>", "a", "<tool_call>", "b"]
    assert byte_level.decode(ids) == "a<tool_call>b"


def test_added_tokens_are_plain_text(metadata):
    # All of its characters are in GPT-2's byte alphabet too, where they would stand for the bytes E9 and BF.
    added = {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "\u00e9\u00bf"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 4],
    }
    tokenizer = Tokenizer.from_gguf(metadata | added)
    assert tokenizer.encode("\u00e9\u00bf") == [tokenizer.vocab_size - 1]
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "\u00e9\u00bf"


def test_special_tokens_come_from_the_metadata(metadata):
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.bos_token_id == tokens.index("<|endoftext|>")
    # The file names <|im_end|> only; <|endoftext|> is a control token that always ends a text.
    assert tokenizer.eos_token_ids == (tokens.index("<|im_end|>"), tokens.index("<|endoftext|>"))


def test_bos_is_added_as_the_pre_tokenizer_defaults_unless_the_file_says(metadata):
    bos = metadata["tokenizer.ggml.bos_token_id"]
    silent = {key: value for key, value in metadata.items() if not key.endswith("add_bos_token")}
    assert Tokenizer.from_gguf(silent).encode("Hello")[0] == bos
    assert Tokenizer.from_gguf(silent | {"tokenizer.ggml.pre": "gpt-2"}).encode("Hello")[0] != bos
    assert Tokenizer.from_gguf(metadata).encode("Hello")[0] != bos
    with_eos = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_eos_token": True})
    assert with_eos.encode("Hello")[-1] == metadata["tokenizer.ggml.eos_token_id"]


def test_the_space_prefix_follows_the_file(golden):
    metadata = golden("sentencepiece.json")["metadata"] | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.id_to_token(ids[0])[0] == "t"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokenizer.ggml.model": "t5"}, "unsupported tokenizer.ggml.model 't5': want 'gpt2'"),
        (
            {"tokenizer.ggml.pre": "klingon"},
            "unknown pre-tokenizer 'klingon'.*known ones: .*llama-bpe.*qwen2",
        ),
        ({"tokenizer.ggml.pre": None}, "no tokenizer.ggml.pre"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "two tokens joined by a space, got 'ab'"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries"),
        ({"tokenizer.ggml.eos_token_id": 99999}, "eos_token_id is 99999, outside the vocabulary"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "wants a bos_token_id"),
    ],
)
def test_bad_metadata_is_refused(metadata, change, match):
    changed = {key: value for key, value in (metadata | change).items() if value is not None}
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_gguf(changed)


def test_repeated_tokens_are_refused(metadata):
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[5] = tokens[6]
    with pytest.raises(ValueError, match="repeats 1 of"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": tokens})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "scores has 1 entries"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces is not supported"),
    ],
)
def test_bad_sentencepiece_metadata_is_refused(golden, change, match):
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_gguf(golden("sentencepiece.json")["metadata"] | change)
