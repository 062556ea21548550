"""The abstract parameter tree: shapes, dtypes and logical axes of every leaf, and random weights."""

from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.trees import unflatten
from jaxinfer.config import ModelConfig
from jaxinfer.kv_spec import KVSpec

Params = dict[str, Any]  # nested; leaves are arrays, or their ShapeDtypeStructs


def abstract_params(config: ModelConfig, dtype: Any) -> tuple[Params, Params]:
    """Returns two trees of one form: a ShapeDtypeStruct, and a tuple of logical axis names, for every leaf.

    Shardings and checkpoint loading are maps over these. Matrices are [out, in].
    """
    leaves = _model(config) | {
        f"layers_{i}/{path}": leaf for i in range(config.num_layers) for path, leaf in _layer(config).items()
    }
    shapes = {path: jax.ShapeDtypeStruct(tuple(leaf.values()), dtype) for path, leaf in leaves.items()}
    return unflatten(shapes), unflatten({path: tuple(leaf) for path, leaf in leaves.items()})


type _Leaves = dict[str, dict[str, int]]  # path: the size of each logical axis


def _model(c: ModelConfig) -> _Leaves:
    matrix = {"vocab": c.vocab_size, "embed": c.hidden_size}
    head = {} if c.tie_word_embeddings else {"lm_head/weight": matrix}
    return {"embed/weight": matrix, "final_norm/scale": {"embed": c.hidden_size}} | head


def _layer(c: ModelConfig) -> _Leaves:
    embed, mlp = {"embed": c.hidden_size}, {"mlp": c.intermediate_size}
    heads, kv_heads = {"heads": c.num_heads * c.head_dim}, {"kv_heads": c.num_kv_heads * c.head_dim}
    norms = {"attention_norm/scale": embed, "mlp_norm/scale": embed}
    if c.qk_norm:
        norms |= {f"attention/{name}_norm/scale": {"head_dim": c.head_dim} for name in ("q", "k")}
    return (
        norms
        | _linear("attention/q", heads, embed, c.qkv_bias)
        | _linear("attention/k", kv_heads, embed, c.qkv_bias)
        | _linear("attention/v", kv_heads, embed, c.qkv_bias)
        | _linear("attention/o", embed, heads, c.o_bias)
        | _linear("mlp/gate", mlp, embed, c.mlp_bias)
        | _linear("mlp/up", mlp, embed, c.mlp_bias)
        | _linear("mlp/down", embed, mlp, c.mlp_bias)
    )


def _linear(path: str, out: dict[str, int], inputs: dict[str, int], has_bias: bool) -> _Leaves:
    return {f"{path}/weight": out | inputs} | ({f"{path}/bias": out} if has_bias else {})


def random_params(config: ModelConfig, dtype: Any = jnp.float32, seed: int = 0) -> Params:
    """Returns untrained parameters, for tests and for benchmarks of models whose weights are not at hand."""
    from jaxinfer.model.batch import TokenBatch
    from jaxinfer.model.decoder import Decoder
    from jaxinfer.model.kv_cache import KVCache

    one, row = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    batch = TokenBatch(one, one, one, one[None], row, jnp.arange(2, dtype=jnp.int32), row[0])

    def everything(decoder: Decoder) -> jax.Array:
        hidden, _ = decoder(KVCache.init(config, 1, 1, KVSpec.parse("auto", jnp.dtype(dtype))), batch)
        return decoder.logits(hidden)

    decoder = Decoder(config, dtype, "reference")
    return jax.jit(lambda: decoder.init(jax.random.key(seed), method=everything))()["params"]
