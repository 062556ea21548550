"""Golden tokenizers (made by scripts/make_tokenizer_golden.py) for the tests of this folder."""

import json
from pathlib import Path

import pytest

from jaxinfer.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizers"


@pytest.fixture(scope="session")
def golden_directory():
    return GOLDEN


@pytest.fixture(scope="session")
def golden():
    """Reads one golden file by name."""

    def read(name):
        return json.loads((GOLDEN / name).read_text(encoding="utf-8"))

    return read


@pytest.fixture(scope="session")
def texts(golden):
    return golden("texts.json")


@pytest.fixture(scope="session")
def byte_level(golden):
    """A byte-level BPE tokenizer of about 520 tokens."""
    return Tokenizer.from_gguf(golden("bpe_qwen35.json")["metadata"])


@pytest.fixture(scope="session")
def sentencepiece_like(golden):
    """A SentencePiece BPE tokenizer of 560 tokens with byte fallback."""
    return Tokenizer.from_gguf(golden("sentencepiece.json")["metadata"])
