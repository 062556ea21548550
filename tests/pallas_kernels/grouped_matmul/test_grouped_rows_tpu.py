import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.mosaic_tpu import grouped_matmul_mosaic_tpu
from pallas_kernels.lora_matmul.api import lora_matmul
from tests.pallas_kernels.grouped_matmul.grouped_cases import check, make
from tests.pallas_kernels.targets import lower


def test_no_races():
    args, expected = make("ragged", jnp.bfloat16)
    f = functools.partial(grouped_matmul_mosaic_tpu, interpret=pltpu.InterpretParams(detect_races=True))
    check(jax.jit(f)(*args), expected, jnp.bfloat16)


@pytest.mark.parametrize("tokens", [1, 256, 4096])
def test_lowers_for_v5e(tokens):
    x, w = jax.ShapeDtypeStruct((tokens, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((8, 14336, 4096), jnp.bfloat16)
    f = functools.partial(grouped_matmul, implementation="mosaic_tpu")
    assert "tpu_custom_call" in lower(f, x, w, jax.ShapeDtypeStruct((8,), jnp.int32), target="v5e")
    a, b = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 16, 4096), (64, 14336, 16)))
    f = functools.partial(lora_matmul, implementation="mosaic_tpu")
    assert "tpu_custom_call" in lower(f, x, a, b, jax.ShapeDtypeStruct((tokens,), jnp.int32), target="v5e")
