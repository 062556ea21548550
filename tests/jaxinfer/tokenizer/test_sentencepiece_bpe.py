import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.tokenizer import sentencepiece_bpe


@pytest.fixture(scope="module")
def reference(golden_directory):
    model = (golden_directory / "sentencepiece.model").read_bytes()
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@given(text=st.text(alphabet=st.sampled_from("  \n\tabehilnot013.,'\u00e9\u0301\u4e2d\u6587\U0001f600"), max_size=60))
def test_ids_equal_sentencepiece(sentencepiece_like, reference, text):
    assert sentencepiece_like.encode(text, add_special_tokens=False) == reference.encode(text)


@given(text=st.text(max_size=30).filter(lambda text: "\x00" not in text))
def test_ids_equal_sentencepiece_on_any_unicode(sentencepiece_like, reference, text):
    assert sentencepiece_like.encode(text, add_special_tokens=False) == reference.encode(text)


def test_pieces_without_byte_fallback_use_unk():
    model = sentencepiece_bpe.build_model(
        ["<unk>", "a", "b", "ab"], [0, -2, -3, -1], [False, True, True, True], "<unk>"
    )
    assert [token.value for token in model.tokenize("ab?!b")] == ["ab", "<unk>", "b"]


def test_control_pieces_are_never_merged_into():
    pieces, scores = ["<unk>", "a", "b", "ab"], [0, -2, -3, -1]
    model = sentencepiece_bpe.build_model(pieces, scores, [False, True, True, False], "<unk>")
    assert [token.value for token in model.tokenize("ab")] == ["a", "b"]


def test_the_best_score_is_merged_first_whatever_the_ids():
    pieces, scores = ["<unk>", "a", "b", "c", "ab", "bc"], [0, -3, -3, -3, -2, -1]
    model = sentencepiece_bpe.build_model(pieces, scores, [False] + [True] * 5, "<unk>")
    assert [token.value for token in model.tokenize("abc")] == ["a", "bc"]
