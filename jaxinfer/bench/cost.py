"""Arithmetic and memory traffic that a model cannot do without, for comparison with a roofline. Imports no jax."""

from jaxinfer.config import ModelConfig


def forward_flops(config: ModelConfig, start: int, stop: int, num_sampled: int) -> int:
    """Returns the floating point operations of the tokens [start, stop) of a sequence.

    Matrix products of all layers, scores and weighted values of attention, and the head for the tokens that are
    sampled from; norms and other element-wise work are left out.
    """
    D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    matrices = config.num_layers * (D * H * 2 * (N + K) + 3 * D * config.intermediate_size)
    attended = sum(_attended(window, start, stop) for window in config.layer_windows)
    head = config.vocab_size * D
    return 2 * matrices * (stop - start) + 4 * N * H * attended + 2 * head * num_sampled


def kv_read_bytes(config: ModelConfig, num_tokens: int, itemsize: float) -> float:
    """Returns the bytes of keys and values that attention reads once for a sequence of so many tokens."""
    per_layer = 2 * config.num_kv_heads * config.head_dim * itemsize
    return sum(per_layer * min(num_tokens, window or num_tokens) for window in config.layer_windows)


def _attended(window: int | None, start: int, stop: int) -> int:
    """Returns how many keys the queries at [start, stop) attend to, together: min(position + 1, window) each."""
    window = window or stop
    full = min(max(window, start), stop)  # positions from here on see a whole window
    return sum(range(start + 1, full + 1)) + (stop - full) * window
