"""What goes into a step and comes out of it, beside the parameters and the batch."""

import dataclasses
from collections.abc import Collection

import jax
import numpy as np

from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.kv_cache import KVCache
from jaxinfer.model.spec import DecoderSpec
from jaxinfer.sampling.state import SamplerState, init_state, to_device
from pallas_kernels.cpu import zeros_on_demand


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngineState:
    """What lives on the device between steps; donated to every step."""

    cache: KVCache
    sampler: SamplerState
    last_tokens: jax.Array  # i32[R]  last sampled token of every slot

    @classmethod
    def init(
        cls, decoder: DecoderSpec, num_slots: int, num_pages: int, page_size: int, kv: KVSpec,
        stop_token_ids: Collection[int], *, on_demand: bool = False,
    ) -> "EngineState":  # fmt: skip
        """Returns the state of an idle engine with R = `num_slots`; under `jax.eval_shape`, its shapes alone.

        `on_demand`: only pages that have been written take memory, where that can be.
        """

        def zero_pages() -> KVCache:
            return KVCache.init(decoder.config, num_pages, page_size, kv, num_slots=num_slots)

        return cls(
            cache=_zeros_on_demand(jax.eval_shape(zero_pages)) if on_demand else zero_pages(),
            sampler=init_state(num_slots, decoder.config.vocab_size, stop_token_ids),
            last_tokens=to_device(np.zeros(num_slots, np.int32)),
        )


def _zeros_on_demand[Tree](shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: zeros_on_demand(leaf.shape, leaf.dtype), shapes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What comes out of a step; the hidden states stay on the device, for log-probabilities."""

    token_ids: jax.Array  # i32[steps, S]  -1 where a row did not sample, or nothing was allowed to it
    hidden: jax.Array  # f[T, D] of a ragged step; f[steps, S, D] of decode steps
