import pytest

from jaxinfer.llm import LLM
from jaxinfer.loading import load
from tests.naive import NaiveLoop

MAX_LEN = 96


@pytest.fixture(scope="session")
def model():
    """The tiny complete model: ChatML template, byte-level tokenizer, 320 tokens, f32."""
    return load("tests/golden/models/tiny-chat")


@pytest.fixture(scope="session")
def naive(model):
    return NaiveLoop(model, MAX_LEN)


@pytest.fixture(scope="session")
def llm(model):
    """One engine for all tests of the interfaces: each step shape is compiled once."""
    return LLM(model, compile_cache=False, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=MAX_LEN)
