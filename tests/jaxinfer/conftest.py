import functools
import signal

import pytest

from jaxinfer.engine import step
from jaxinfer.llm import LLM
from jaxinfer.loading import load
from tests.naive import NaiveLoop

MAX_LEN = 96
step.jit_step = functools.cache(step.jit_step)  # engines of one model share a step of one shape: it compiles once


@pytest.fixture(scope="session")
def model():
    """The tiny complete model: ChatML template, byte-level tokenizer, 320 tokens, f32."""
    return load("tests/golden/models/tiny-chat")


@pytest.fixture(scope="session")
def naive(model):
    return NaiveLoop(model, MAX_LEN)


@pytest.fixture(scope="session")
def llm(model):
    """One engine for all tests of the interfaces."""
    return LLM(model, compile_cache=False, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=MAX_LEN)


@pytest.fixture
def interruptible():
    """Lets Ctrl-C reach this process and its children, though a background job of a shell ignores it."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)
