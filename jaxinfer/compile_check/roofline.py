"""The least work of a step, counted from the model's shape, and the time a device needs for it. Imports no jax.

Counted are matrix products and attention, weights and visited KV once, logits written and read. A step cannot be
faster; what XLA adds (temporary arrays, padding to buckets, the sampler) is not counted.
"""

import dataclasses
from collections.abc import Mapping

from jaxinfer.compile_check.plan import Plan
from jaxinfer.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The bounds of one step on one device.

    Attributes:
        flops: operations.
        num_bytes: bytes of memory traffic, by what for.
        compute_s: seconds for the operations at the peak rate.
        memory_s: seconds for the bytes at the full bandwidth.
        tokens: tokens that the step advances.
    """

    flops: float
    num_bytes: Mapping[str, float]
    compute_s: float
    memory_s: float
    tokens: int

    @property
    def bound(self) -> str:
        """What limits the step: "memory" or "compute"."""
        return "memory" if self.memory_s >= self.compute_s else "compute"

    @property
    def seconds(self) -> float:
        """The larger of the two times."""
        return max(self.compute_s, self.memory_s)


def decode_roofline(plan: Plan) -> Roofline:
    """Returns the bounds of one decode step of `max_num_seqs` rows with `plan.context` keys each."""
    S, config = plan.engine.max_num_seqs, plan.model
    pairs = sum(S * min(plan.context, window or plan.context) for window in config.layer_windows)
    return _roofline(plan, tokens=S, rows=S, pairs=pairs, keys=pairs)


def prefill_roofline(plan: Plan) -> Roofline:
    """Returns the bounds of the first chunk of one prompt, of `max_num_batched_tokens` tokens."""
    T, config = plan.engine.max_num_batched_tokens, plan.model
    pairs = sum(_causal_pairs(T, window or T) for window in config.layer_windows)
    return _roofline(plan, tokens=T, rows=1, pairs=pairs, keys=T * config.num_layers)


def _roofline(plan: Plan, *, tokens: int, rows: int, pairs: int, keys: int) -> Roofline:
    """`pairs` and `keys`: visible (query, key) pairs, and keys read, of all layers together."""
    config, n, itemsize = plan.model, plan.num_devices, plan.itemsize
    layers, head = _matrix_elements(config), config.vocab_size * config.hidden_size
    flops = 2 * tokens * layers + 2 * rows * head + 4 * config.num_heads * config.head_dim * pairs
    kv = plan.kv.bytes_per_token(config, plan.engine.page_size) / config.num_layers
    num_bytes = {
        "weights": (layers + head) * itemsize / n,
        "embedding rows": tokens * config.hidden_size * itemsize,
        "KV read": keys * kv / n,
        "KV written": tokens * config.num_layers * kv / n,
        "logits": 2 * rows * config.vocab_size * 4 / n,
    }
    device = plan.device
    peak = device.peak["bf16"] / (2 if plan.dtype == "float32" else 1)
    return Roofline(flops / n, num_bytes, flops / n / peak, sum(num_bytes.values()) / device.bandwidth, tokens)


def _matrix_elements(config: ModelConfig) -> int:
    D, H = config.hidden_size, config.head_dim
    attention = D * H * 2 * (config.num_heads + config.num_kv_heads)
    return config.num_layers * (attention + 3 * D * config.intermediate_size)


def _causal_pairs(tokens: int, window: int) -> int:
    window = min(window, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window
