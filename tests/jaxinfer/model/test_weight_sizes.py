import jax
import jax.numpy as jnp
import pytest

from checkpoints.gguf_io import GGUFFile
from jaxinfer.loading import load, read_gguf_config
from jaxinfer.model.weight_sizes import weight_bytes
from jaxinfer.quantization.layouts import Layout, current_layout

GGUF = "tests/golden/models/llama-tied/model.gguf"
DIRECTORY = "tests/golden/models/tiny-chat"


@pytest.mark.parametrize("quantize", ["none", None, "int8", "int4"])
@pytest.mark.parametrize("path", [GGUF, DIRECTORY])
def test_bytes_are_those_of_the_loaded_weights(path, quantize):
    model = load(path, quantize=quantize, dtype="bfloat16")
    loaded = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    if path == DIRECTORY:
        found = weight_bytes(model.config, jnp.dtype("bfloat16"), quantize, current_layout())
    else:
        with GGUFFile(path) as file:
            found = weight_bytes(read_gguf_config(file), jnp.dtype("bfloat16"), quantize, current_layout(), file)
    assert found == loaded


def test_planes_for_accelerators(llama_3_8b):
    """Every matrix, embedding and head too: int8 with an f32 scale for 32 inputs, int4 with a zero point as well."""
    config, bf16 = llama_3_8b, jnp.dtype("bfloat16")
    whole, int8, int4 = (weight_bytes(config, bf16, q, Layout.PLANES) for q in (None, "int8", "int4"))
    assert whole == 2 * config.num_parameters
    assert int8 / whole == pytest.approx((8 + 32 / 32) / 16, abs=0.001)
    assert int4 / whole == pytest.approx((4 + 2 * 32 / 32) / 16, abs=0.001)


@pytest.fixture
def llama_3_8b():
    from jaxinfer.compile_check.model_shapes import MODEL_SHAPES

    return MODEL_SHAPES["llama-3-8b"]
