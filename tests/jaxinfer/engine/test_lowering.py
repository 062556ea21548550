"""The step that runs here lowers for GPU and TPU as well: no operation or shape that those lack."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.batch import BatchShape
from jaxinfer.engine.step import EngineState, model_step
from jaxinfer.model.decoder import Decoder
from jaxinfer.model.kv_cache import KVCache
from jaxinfer.model.params import abstract_params
from jaxinfer.sampling.state import init_state


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("shape", [BatchShape(8, 8, 6, True), BatchShape(32, 8, 6, False)], ids=["decode", "ragged"])
def test_step_lowers(model, shape, platform):
    decoder = Decoder(model.config, jnp.bfloat16)
    V = model.config.vocab_size
    params, _ = abstract_params(model.config, jnp.bfloat16)
    state = jax.eval_shape(
        lambda: EngineState(
            KVCache.init(model.config, 9, 16, jnp.bfloat16), init_state(8, V, [2]), jnp.zeros(8, jnp.int32)
        )
    )
    step = jax.jit(functools.partial(model_step, decoder), static_argnums=(0, 1), donate_argnames=("state",))
    ints = jax.ShapeDtypeStruct((sum(map(math.prod, shape.ints().values())),), jnp.int32)
    floats = jax.ShapeDtypeStruct((7, shape.num_rows), jnp.float32)
    mask = jax.ShapeDtypeStruct((shape.num_rows, -(-V // 32)), jnp.uint32)
    lowered = step.trace(shape, 4, params, state, ints, floats, mask).lower(lowering_platforms=(platform,))
    assert "bf16" in lowered.as_text()
