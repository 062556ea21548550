"""Prefill and decode apart: the work that each cannot do without, and the share of the roofline that was reached."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxinfer.bench.cost import forward_flops, kv_read_bytes
from jaxinfer.bench.metrics import Trace, last_first_token, tail_tokens
from jaxinfer.bench.roofline import Roofline
from jaxinfer.engine.engine import Engine
from jaxinfer.loading import Model


@dataclasses.dataclass(frozen=True)
class Phase:
    """Work done in a phase and how long it took."""

    tokens: int
    seconds: float
    flops: float
    bytes: float

    def figures(self, roofline: Roofline) -> dict[str, float]:
        """Returns work a token, speeds in units per second, and the shares of the roofline."""
        return {
            "tokens": self.tokens,
            "tok_s": self.tokens / self.seconds,
            "token_flops": self.flops / self.tokens,
            "token_bytes": self.bytes / self.tokens,
            "flop_share": self.flops / self.seconds / roofline.flop_s,
            "byte_share": self.bytes / self.seconds / roofline.byte_s,
            "roofline_share": roofline.seconds(self.flops, self.bytes) / self.seconds,
        }


def phases(engine: Engine, traces: Sequence[Trace]) -> dict[str, Phase]:
    """Returns the phases of a run that can be told apart.

    "prefill" up to the first token of a request that runs alone; "decode" after the last first token, if every request
    still runs then. Both count a read of all weights for each step.
    """
    config, itemsize = engine.config.seen_by(engine.model.config), _kv_itemsize(engine)
    found = {}
    if len(traces) == 1:
        [trace] = traces
        length, chunk = trace.num_prompt_tokens, engine.config.max_num_batched_tokens
        ends = [*range(chunk, length, chunk), length]
        kv = sum(kv_read_bytes(config, end, itemsize) for end in ends)
        weights = len(ends) * streamed_bytes(engine.model)
        found["prefill"] = Phase(length, trace.ttft, forward_flops(config, 0, length, 1), weights + kv)
    first = last_first_token(traces)
    tails = [tail_tokens(trace, first) for trace in traces]
    if all(tails):
        flops = kv = 0.0
        for trace, tail in zip(traces, tails, strict=True):
            for i in tail:  # output token i comes from a step over prompt and i outputs
                length = trace.num_prompt_tokens + i
                flops += forward_flops(config, length - 1, length, 1)
                kv += kv_read_bytes(config, length, itemsize)
        weights = max(len(tail) for tail in tails) * streamed_bytes(engine.model)
        seconds = max(trace.tokens[-1] for trace in traces) - first
        found["decode"] = Phase(sum(map(len, tails)), seconds, flops, weights + kv)
    return found


def streamed_bytes(model: Model) -> int:
    """Returns the bytes of weights that every step reads: all but a table of embeddings that is not also the head."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    if model.config.tie_word_embeddings:
        return total
    return total - sum(leaf.nbytes for leaf in jax.tree.leaves(model.params["embed"]))


def _kv_itemsize(engine: Engine) -> float:
    """Returns the bytes of an element of the KV cache, its share of scales included."""
    config = engine.model.config
    return engine.stats().kv_bytes_per_token / (2 * config.num_layers * config.num_kv_heads * config.head_dim)
