"""The haystacks of scripts/needle.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

from jaxinfer.tokenizer import Tokenizer


@pytest.fixture
def needle(monkeypatch):
    spec = importlib.util.spec_from_file_location("needle", Path("scripts/needle.py"))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "needle", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_a_needle_lies_where_it_should(needle):
    tokenizer = Tokenizer.from_directory(Path("tests/golden/models/tiny-chat"))
    found = needle.make_haystacks("the cache keeps what it has read. " * 400, tokenizer, [200, 400], [0.0, 0.5, 1.0])
    assert [(h.length, h.depth) for h in found] == [(n, d) for n in (200, 400) for d in (0.0, 0.5, 1.0)]
    assert len({h.key for h in found}) == 6
    for haystack in found:
        assert len(haystack.prompt) == haystack.length
        text = tokenizer.decode(haystack.prompt)
        assert text.count(haystack.key) == 2
        before, after = text.split(needle.NEEDLE.format(key=haystack.key))
        assert after.endswith(needle.QUESTION)
        rest = len(after) - len(needle.QUESTION)
        assert len(before) / (len(before) + rest) == pytest.approx(haystack.depth, abs=0.02)
        assert needle.is_found(haystack, f" {haystack.key}. Remember")
        assert not needle.is_found(haystack, " 1 or " + haystack.key)
    with pytest.raises(ValueError, match="at its beginning, 400 are wanted"):
        needle.make_haystacks("short", tokenizer, [400], [0.5])
