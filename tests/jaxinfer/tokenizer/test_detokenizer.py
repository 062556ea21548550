import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.tokenizer import IncrementalDetokenizer

ALPHABET = "ab \n1.\u00e9e\u0301\u0928\u094d\u4e2d\U0001f600\U0001f469\u200d\U0001f4bb\U0001f1e9\u2581"
TEXT = st.text(alphabet=st.one_of(st.sampled_from(ALPHABET), st.characters(exclude_categories=["Cs"])), max_size=40)


@pytest.fixture(params=["byte_level", "sentencepiece_like"], scope="module")
def tokenizer(request):
    return request.getfixturevalue(request.param)


def cut(ids, data):
    """Cuts ids into pushes at drawn places."""
    ends = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *ends], [*ends, len(ids)])]


def run(detokenizer, pushes):
    return [detokenizer.push(ids) for ids in pushes], detokenizer.flush()


@given(text=TEXT, skip=st.booleans(), continuation=st.booleans(), data=st.data())
def test_pushes_joined_equal_decode_for_texts(tokenizer, text, skip, continuation, data):
    ids = tokenizer.encode(text)
    options = {"skip_special_tokens": skip, "continuation": continuation}
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces, rest = run(detokenizer, cut(ids, data))
    assert "".join(pieces) + rest == detokenizer.text == tokenizer.decode(ids, **options)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)  # nothing was emitted before it was whole
        assert rest == ""


@given(data=st.data())
def test_pushes_joined_equal_decode_for_any_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces, rest = run(detokenizer, cut(ids, data))
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def expected_cut(text, stop, include):
    """The definition, character by character: the stop that completes first, the longest of several."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    text=st.text(alphabet="ab\u00e9\U0001f600 ", max_size=25),
    stop=st.lists(st.text(alphabet="ab\u00e9\U0001f600 ", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    data=st.data(),
)
def test_stop_strings_cut_the_text_whatever_the_pushes(tokenizer, text, stop, include, data):
    ids = tokenizer.encode(text)
    text = tokenizer.decode(ids)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stop, include_stop_str_in_output=include)
    want, matched = expected_cut(text, stop, include)
    for push in cut(ids, data):
        detokenizer.push(push)
        assert want.startswith(detokenizer.text)  # never a character of the stop string
        if matched is not None and detokenizer.stopped is None and not include:
            assert not any(detokenizer.text.endswith(string) for string in stop)
    detokenizer.flush()
    assert detokenizer.text == want
    assert detokenizer.stopped == matched
    if matched is not None:
        index = detokenizer.stop_token_index
        assert matched in tokenizer.decode(ids[: index + 1])
        assert expected_cut(tokenizer.decode(ids[:index]).rstrip("\ufffd"), stop, include)[1] is None


def test_a_character_is_held_until_its_last_byte(byte_level):
    ids = [byte_level._backend.token_to_id(c) for c in "\u00f0\u0141\u013c\u0122"]  # F0 9F 9A 80 in GPT-2's alphabet
    assert b"".join(map(byte_level.token_bytes, ids)) == "\U0001f680".encode()
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "\U0001f680"]
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(ids[:3]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_possible_stop_is_held_back_and_released(byte_level):
    encode = byte_level.encode
    detokenizer = IncrementalDetokenizer(byte_level, stop=["END."])
    assert detokenizer.push(encode("xEN")) == "x"
    assert detokenizer.push(encode("EN")) == "EN"
    assert detokenizer.push(encode("D?")) == "END?"
    assert detokenizer.push(encode("E")) == ""
    assert detokenizer.flush() == "E"
    assert detokenizer.stopped is None
    assert detokenizer.stop_token_index is None


def test_a_stop_string_inside_and_across_tokens(byte_level):
    ids = byte_level.encode("Hello world, hello", add_special_tokens=False)
    for stop in ("llo wor", "l", "o", "hello"):
        detokenizer = IncrementalDetokenizer(byte_level, stop=[stop])
        assert detokenizer.push(ids) == "Hello world, hello".partition(stop)[0]
        assert detokenizer.stopped == stop
        before = byte_level.decode(ids[: detokenizer.stop_token_index])
        assert stop not in before
        assert stop in byte_level.decode(ids[: detokenizer.stop_token_index + 1])
        assert detokenizer.push(ids) == detokenizer.flush() == ""


def test_special_tokens_take_part_in_stops_only_when_they_are_shown(byte_level):
    ids = byte_level.encode("a<|im_end|>b")
    shown = IncrementalDetokenizer(byte_level, stop=["<|im_end|>"], skip_special_tokens=False)
    assert shown.push(ids) == "a"
    assert shown.stop_token_index == 1
    hidden = IncrementalDetokenizer(byte_level, stop=["<|im_end|>"])
    assert hidden.push(ids) == "ab"
    assert hidden.stopped is None


def test_a_stop_completed_by_the_flush(byte_level):
    first_byte = byte_level._backend.token_to_id("\u00f0")
    detokenizer = IncrementalDetokenizer(byte_level, stop=["\ufffd"])
    assert detokenizer.push([first_byte]) == ""
    assert detokenizer.flush() == ""
    assert detokenizer.stopped == "\ufffd"
    assert detokenizer.stop_token_index == 0


@pytest.mark.parametrize(
    ("stop", "match"),
    [
        ("abc", r"write stop=\['abc'\]"),
        (["a", ""], r"stop\[1\] must be a non-empty"),
        ([3], r"stop\[0\] .*got 3"),
    ],
)
def test_bad_stops_are_refused(byte_level, stop, match):
    with pytest.raises(ValueError, match=match):
        IncrementalDetokenizer(byte_level, stop=stop)


def test_misuse_is_refused(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    with pytest.raises(ValueError, match="token id -1 is not in the vocabulary"):
        detokenizer.push([-1])
    detokenizer.flush()
    assert detokenizer.flush() == ""
    with pytest.raises(ValueError, match="push after flush"):
        detokenizer.push([0])
