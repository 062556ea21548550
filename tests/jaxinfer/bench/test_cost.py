import dataclasses

import pytest

from jaxinfer.bench.cost import forward_flops, kv_read_bytes
from jaxinfer.config import ModelConfig
from jaxinfer.kv_spec import KVSpec

TINY = ModelConfig(
    family="llama", vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True,
)  # fmt: skip


def naive_flops(config, start, stop, num_sampled):
    """Counts every matrix product of every token by its shape."""
    D, F, N, K, H = 8, 16, 4, 2, 4
    total = 0
    for position in range(start, stop):
        for window in config.layer_windows:
            total += 2 * D * N * H + 2 * 2 * D * K * H + 2 * N * H * D + 3 * 2 * D * F
            total += 2 * 2 * N * H * min(position + 1, window or position + 1)
    return total + num_sampled * 2 * D * 100


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 7), (5, 6), (3, 20)])
@pytest.mark.parametrize("windows", [(None, None), (4, None), (4, 30)])
def test_flops_are_those_of_every_product(start, stop, windows):
    model = dataclasses.replace(TINY, layer_windows=windows)
    assert forward_flops(model, start, stop, 1) == naive_flops(model, start, stop, 1)


def test_flops_of_matrices_are_twice_the_parameters():
    norms = 2 * 2 * 8 + 8
    attention = 4 * 4 * 4 * 2  # one key in each of two layers
    assert forward_flops(TINY, 0, 1, 1) == 2 * (TINY.num_parameters - norms) + attention


def test_kv_bytes_are_those_of_the_cache_unless_a_window_is_shorter():
    assert kv_read_bytes(TINY, 10, 4) == 10 * KVSpec("float32", "float32").bytes_per_token(TINY)
    assert kv_read_bytes(dataclasses.replace(TINY, layer_windows=(4, None)), 10, 2) == (4 + 10) * 2 * 2 * 4 * 2
