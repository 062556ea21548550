import pytest

from jaxinfer.loading import load
from tests.naive import NaiveLoop

MAX_LEN = 96


@pytest.fixture(scope="session")
def model():
    return load("tests/golden/models/tiny-chat")


@pytest.fixture(scope="session")
def naive(model):
    return NaiveLoop(model, MAX_LEN)
