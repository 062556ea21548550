"""The step that runs here lowers for GPU and TPU as well: no operation or shape that those lack."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.engine.batch import BatchShape
from jaxinfer.engine.state import EngineState
from jaxinfer.engine.step import jit_step
from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.params import abstract_params
from jaxinfer.model.spec import DecoderSpec


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("shape", [BatchShape(8, 8, 6, True), BatchShape(32, 8, 6, False)], ids=["decode", "ragged"])
@pytest.mark.parametrize(
    ("kv_dtype", "sinks"), [("auto", 0), *(pytest.param(kv, 4, marks=pytest.mark.slow) for kv in ("auto", "int4"))]
)
def test_step_lowers(model, shape, platform, kv_dtype, sinks):
    config = model.config.streaming(sinks, 64) if sinks else model.config
    decoder = DecoderSpec(config, jnp.bfloat16)
    kv = KVSpec.parse(kv_dtype, "bfloat16")
    params, _ = abstract_params(model.config, jnp.bfloat16)
    state = jax.eval_shape(lambda: EngineState.init(decoder, 8, 9, kv.page_size, kv, [2]))
    inputs = shape.abstract_inputs(model.config.vocab_size)
    lowered = jit_step(decoder.build()).trace(shape, 4, params, state, *inputs).lower(lowering_platforms=(platform,))
    assert "bf16" in lowered.as_text()
