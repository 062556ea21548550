"""The engine's steps with abstract parameters and state: what `ModelRunner` compiles, without weights or a device."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.compile_check.plan import Plan
from jaxinfer.engine.batch import BatchShape, Buckets
from jaxinfer.engine.live_pages import LivePages
from jaxinfer.engine.memory import plan_pages
from jaxinfer.engine.state import EngineState
from jaxinfer.engine.step import jit_step
from jaxinfer.model.params import abstract_params
from jaxinfer.model.spec import DecoderSpec
from sharding import AxisRules, tree_shardings


@dataclasses.dataclass(frozen=True)
class AbstractStep:
    """A step ready to be lowered.

    Attributes:
        name: "decode" or "prefill".
        shape: its static sizes.
        function: the jitted step.
        arguments: ShapeDtypeStructs with their shardings, after the static ones.
    """

    name: str
    shape: BatchShape
    function: Any
    arguments: tuple[Any, ...]

    def lower(self, platform: str) -> jax.stages.Lowered:
        """Lowers it for "cuda" or "tpu"; the mesh in use says for which device."""
        return self.function.trace(*self.arguments).lower(lowering_platforms=(platform,))


def engine_steps(plan: Plan, mesh: Any, num_pages: int) -> Iterator[AbstractStep]:
    """Yields the largest decode step and the largest ragged step of the plan's engine.

    Weights follow `AxisRules`, KV pages are split over the KV heads, everything else is on every device.

    Args:
        plan: what to compile.
        mesh: of axes "data" and "model", real or abstract.
        num_pages: pages of the KV cache.
    """
    config, engine = plan.model, plan.engine
    decoder = DecoderSpec(config, jnp.dtype(plan.dtype), engine.attention_implementation)
    params, axes = abstract_params(config, decoder.dtype)
    params = jax.tree.map(_placed, params, tree_shardings(params, axes, mesh, AxisRules()))
    state = jax.eval_shape(
        lambda: EngineState.init(decoder, engine.max_num_seqs, num_pages, engine.page_size, plan.kv, frozenset())
    )
    everywhere, by_head = (NamedSharding(mesh, PartitionSpec(*split)) for split in ((), ("model",)))
    state = dataclasses.replace(_place(state, everywhere), cache=_place(state.cache, by_head))

    assert engine.max_model_len is not None
    buckets = Buckets.of(engine, LivePages.of(config, engine).most(engine.max_model_len))
    shapes = {
        "decode": buckets.decode(engine.max_num_seqs),
        "prefill": buckets.ragged(engine.max_num_batched_tokens, engine.max_num_seqs),
    }
    for name, shape in shapes.items():
        inputs = _place(shape.abstract_inputs(config.vocab_size), everywhere)
        yield AbstractStep(name, shape, jit_step(decoder.build()), (shape, engine.decode_steps, params, state, *inputs))


def fit_pages(plan: Plan) -> int:
    """Returns the pages that the engine would choose on the plan's devices; what one device lacks is an error.

    Raises:
        ValueError: the weights alone do not fit, or no page beside them.
    """
    device, n = plan.device, plan.num_devices
    usable = int(device.memory_bytes * device.usable_share)
    weights = weight_bytes_per_device(plan)
    if weights >= usable:
        raise ValueError(
            f"the weights do not fit: {weights / 2**30:.1f} GiB a device, {device.name} has {usable / 2**30:.1f} GiB "
            f"that jax can use; use more devices (--mesh model={2 * n}) or a smaller model"
        )
    pages, _ = plan_pages(plan.model, plan.engine, plan.kv, (usable - weights) * n, is_cpu=False)
    return pages


def weight_bytes_per_device(plan: Plan) -> int:
    """Returns the bytes of the weights on one device: matrices are split, norms are not."""
    params, axes = abstract_params(plan.model, jnp.dtype(plan.dtype))

    def size(leaf: jax.ShapeDtypeStruct, names: tuple[str, ...]) -> int:
        split = any(axis is not None for axis in AxisRules().spec(names))
        return leaf.size * leaf.dtype.itemsize // (plan.num_devices if split else 1)

    return sum(jax.tree.leaves(jax.tree.map(size, params, axes)))


def _place(tree: Any, sharding: NamedSharding) -> Any:
    return jax.tree.map(lambda leaf: _placed(leaf, sharding), tree)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
