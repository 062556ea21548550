"""The abstract parameter tree: shapes, dtypes and logical axes of every leaf, and random weights."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.batch import TokenBatch
from jaxinfer.model.decoder import Decoder
from jaxinfer.model.kv_cache import KVCache

Params = dict[str, Any]  # nested; leaves are arrays, or their ShapeDtypeStructs


def abstract_params(config: ModelConfig, dtype: Any) -> tuple[Params, Params]:
    """Returns two trees of one form: a ShapeDtypeStruct, and a tuple of logical axis names, for every leaf.

    Initialisation, shardings and checkpoint loading are maps over these.
    """
    one_layer = dataclasses.replace(config, num_layers=1, layer_windows=(), layer_rope=())
    boxed = jax.eval_shape(lambda: _init(one_layer, dtype, 0))
    layer = boxed.pop("layers_0")  # all layers have the same shapes: one is traced
    boxed |= {f"layers_{i}": layer for i in range(config.num_layers)}

    def is_box(x: Any) -> bool:
        return isinstance(x, nn.Partitioned)

    axes = jax.tree.map(lambda box: box.names, boxed, is_leaf=is_box)
    return nn.meta.unbox(boxed), axes


def random_params(config: ModelConfig, dtype: Any = jnp.float32, seed: int = 0) -> Params:
    """Returns untrained parameters, for tests and for benchmarks of models whose weights are not at hand."""
    return nn.meta.unbox(jax.jit(lambda: _init(config, dtype, seed))())


def _init(config: ModelConfig, dtype: Any, seed: int) -> Params:
    one, row = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    batch = TokenBatch(one, one, one, one[None], row, jnp.arange(2, dtype=jnp.int32), row[0])

    def everything(decoder: Decoder) -> jax.Array:
        hidden, _ = decoder(KVCache.init(config, 1, 1, KVSpec.parse("auto", jnp.dtype(dtype))), batch)
        return decoder.logits(hidden)

    decoder = Decoder(config, dtype, "reference")
    variables: Any = decoder.init(jax.random.key(seed), method=everything)
    return variables["params"]
