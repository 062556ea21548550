import subprocess
import sys

import numpy as np
import pytest

from jaxinfer.tokenizer import Tokenizer


def test_imports_without_jax():
    code = "import sys, jaxinfer.tokenizer; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def with_bos(golden):
    metadata = golden("sentencepiece.json")["metadata"]
    return Tokenizer.from_gguf(metadata)  # SentencePiece models add BOS unless told otherwise


def test_bos_is_added_once(with_bos):
    bos = with_bos.bos_token_id
    assert with_bos.encode("") == [bos]
    ids = with_bos.encode("a")
    assert ids[0] == bos
    assert with_bos.encode("a", add_special_tokens=False) == ids[1:]
    assert with_bos.encode("<s>a") == ids


def test_text_must_be_unicode(byte_level):
    for bad in (b"abc", "a\ud800", None):
        with pytest.raises(ValueError, match="text must be a str of valid Unicode"):
            byte_level.encode(bad)


def test_decode_of_invalid_utf8_and_numpy_ids(byte_level):
    ids = byte_level.encode("\U0001f680", add_special_tokens=False)
    assert byte_level.decode(np.array(ids)) == "\U0001f680"
    assert "\ufffd" in byte_level.decode(byte_level.encode("\u0945\u0945")[1:])


def test_decode_equals_the_library_on_valid_text(byte_level, sentencepiece_like, texts):
    for tokenizer in (byte_level, sentencepiece_like):
        for text in texts:
            ids = tokenizer.encode(text)
            for skip in (True, False):
                want = tokenizer._backend.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == want


@pytest.mark.parametrize("token_id", [-1, 10**12, np.int32(100_000)])
def test_ids_outside_the_vocabulary(byte_level, token_id):
    for method in (byte_level.id_to_token, byte_level.token_bytes, lambda i: byte_level.decode([0, i])):
        with pytest.raises(ValueError, match="is not in the vocabulary of"):
            method(token_id)


def test_token_bytes(byte_level, sentencepiece_like):
    text = "<|im_start|>na\u00efve \U0001f680\n"
    ids = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    assert byte_level.token_bytes(ids[0]) == b"<|im_start|>"
    # U+216A is not in the vocabulary: three byte tokens.
    ids = sentencepiece_like.encode("\u216a", add_special_tokens=False)
    assert [sentencepiece_like.token_bytes(i) for i in ids] == [b" ", b"\xe2", b"\x85", b"\xaa"]
    assert [sentencepiece_like.id_to_token(i) for i in ids[1:]] == ["<0xE2>", "<0x85>", "<0xAA>"]


def test_a_continuation_keeps_its_leading_space(sentencepiece_like):
    ids = sentencepiece_like.encode("the", add_special_tokens=False)
    assert sentencepiece_like.decode(ids) == "the"
    assert sentencepiece_like.decode(ids, continuation=True) == " the"
    assert sentencepiece_like.decode(sentencepiece_like.encode("  the")) == "  the"


def test_constructor_checks_ids(byte_level):
    backend = byte_level._backend
    with pytest.raises(ValueError, match="add_bos=True wants a bos_token_id"):
        Tokenizer(backend, add_bos=True)
    with pytest.raises(ValueError, match="add_eos=True wants an entry in eos_token_ids"):
        Tokenizer(backend, add_eos=True)
    with pytest.raises(ValueError, match="token id 99999 is not in the vocabulary"):
        Tokenizer(backend, eos_token_ids=[99999])
