"""Every family and both file formats against logits of transformers (tests/golden/README.md)."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.loading import load, load_hf_params
from jaxinfer.model.decoder import Decoder
from jaxinfer.model.families import config_from_hf
from jaxinfer.model.params import abstract_params
from tests.helpers import PagedRow

MODELS = Path("tests/golden/models")
CASES = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
GGUF_CASES = sorted(path.parent.name for path in MODELS.glob("*/model.gguf"))
QUICK = (  # every family and option; the others vary them
    "llama-mha-bias", "llama-mqa", "llama-sharded", "llama-yarn", "llama3-rope", "mistral", "qwen2-window", "qwen3",
    "smollm3", "tiny-chat",
)  # fmt: skip


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


def load_hf(name):
    config = config_from_hf(json.loads((MODELS / name / "config.json").read_text()))
    abstract, _ = abstract_params(config, jnp.float32)
    return Decoder(config), load_hf_params(MODELS / name, config, abstract)


def check(decoder, params, golden, chunk_size=64, atol=1e-4):
    """All logits of the prompt, then the greedy continuation token by token, each from its own argmax."""
    row, tokens = PagedRow(decoder, params), []
    logits = row.feed_in_chunks(golden["token_ids"], chunk_size)
    np.testing.assert_allclose(logits, golden["logits"], atol=atol, rtol=0)
    for _ in golden["greedy"]:
        tokens.append(int(logits[-1].argmax()))
        logits = row.feed(tokens[-1:])
    assert tokens == golden["greedy"].tolist()  # margins exceed 0.03


def test_there_are_golden_files():
    assert len(CASES) >= 21
    assert len(GGUF_CASES) >= 10


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in CASES])
def test_hugging_face(name):
    check(*load_hf(name), np.load(MODELS / name / "golden.npz"))


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in GGUF_CASES])
@pytest.mark.parametrize(("activations", "atol"), [(None, 1e-4), ("int16", 3e-3)])
def test_gguf(name, activations, atol):
    model = load(MODELS / name / "model.gguf", dtype="float32")
    check(
        model.decoder.clone(activations=activations),
        model.params,
        np.load(MODELS / name / "golden_gguf.npz"),
        atol=atol,
    )


@pytest.mark.parametrize("chunk_size", [1, 7])
@pytest.mark.parametrize("name", ["qwen2-window", "llama-untied"])  # with and without sliding windows
def test_chunked_prefill(name, chunk_size):
    check(*load_hf(name), np.load(MODELS / name / "golden.npz"), chunk_size)
