"""Small, awkward cases: one token, empty rows, lengths beside tile edges, NaN in what must not be read."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.quantized_matmul import quantize_weight, quantized_matmul
from pallas_kernels.specs import KernelSpec

PAGE = 16


def edge_specs(operation: str) -> tuple[KernelSpec, ...]:
    """Returns the edge cases of an operation: those of its `specs.EDGES` where it has them, else ours."""
    own = importlib.import_module(f"pallas_kernels.{operation}.specs")
    if hasattr(own, "EDGES"):
        return tuple(own.EDGES)
    make = {"paged_attention": _paged, "flash_attention": _flash, "quantized_matmul": _quantized}.get(operation)
    return make() if make else ()


def _paged() -> tuple[KernelSpec, ...]:
    mixes = {
        "one_token": [(1, 1)],
        "page_edges": [(1, 15), (1, 16), (1, 17), (1, 0)],
        "tile_edges": [(1, 127), (1, 129), (63, 63), (65, 200), (128, 128)],
        "chunk_of_a_long_row": [(1, 700), (100, 1000)],
    }
    options = {"plain": {}, "window": {"sliding_window": 33}}
    return tuple(
        _paged_spec(f"edge/{name}/H{H}/{kind}", rows, H, **option)
        for name, rows in mixes.items()
        for H in (64, 128)
        for kind, option in options.items()
    )


def _paged_spec(name: str, rows: list[tuple[int, int]], H: int, **options: Any) -> KernelSpec:
    """`rows`: (query tokens, keys) of each row, decode rows first; pages in random order, unwritten slots NaN."""
    K, N, rng = 2, 8, np.random.default_rng(0)
    q_lens, kv_lens = (np.array(lens, np.int32) for lens in zip(*rows))
    q_lens = np.minimum(q_lens, kv_lens)
    per_row = -(-kv_lens // PAGE)
    order = rng.permutation(int(per_row.sum())).astype(np.int32) + 1
    page_indices = np.zeros((len(rows), int(per_row.max())), np.int32)
    owner = np.split(order, np.cumsum(per_row)[:-1])
    written = np.zeros((order.size + 1, PAGE), bool)
    for row, pages in enumerate(owner):
        page_indices[row, : len(pages)] = pages
        written[pages] = (np.arange(len(pages) * PAGE) < kv_lens[row]).reshape(-1, PAGE)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    T, num_decode = int(cu_q_lens[-1]), int(np.cumprod(q_lens <= 1).sum())
    if any(q_lens[:num_decode] == 0):  # token s of a decode row s must be its own
        num_decode = int(np.argmin(q_lens[:num_decode]))

    def arguments() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(1), 3)
        q = jax.random.normal(keys[0], (T, N, H), jnp.bfloat16)
        k, v = (jax.random.normal(key, (K, *written.shape, H), jnp.bfloat16) for key in keys[1:])
        k, v = (jnp.where(jnp.asarray(written)[None, :, :, None], x, jnp.bfloat16(jnp.nan)) for x in (k, v))
        ints = (page_indices, kv_lens, cu_q_lens, np.int32(num_decode))
        return q, k, v, *map(jnp.asarray, ints)

    pairs = int(sum(q * kv for q, kv in zip(q_lens, kv_lens)))
    run = functools.partial(ragged_paged_attention, scale=H**-0.5, **options)
    return KernelSpec(name, run, arguments, 4.0 * N * H * pairs, 4.0 * K * H * int(kv_lens.sum()))


def _flash() -> tuple[KernelSpec, ...]:
    def spec(T: int, S: int, N: int, K: int, H: int, **options: Any) -> KernelSpec:
        def arguments() -> tuple[jax.Array, ...]:
            keys = jax.random.split(jax.random.key(2), 3)
            shapes = ((2, T, N, H), (2, S, K, H), (2, S, K, H))
            return tuple(jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes))

        name = f"edge/T{T}_S{S}_N{N}_K{K}_H{H}" + "".join(f"_{key}{value}" for key, value in options.items())
        return KernelSpec(
            name, functools.partial(flash_attention, **options), arguments, 8.0 * N * H * T * S, 8.0 * N * H * T
        )

    return (
        spec(1, 1, 4, 2, 64),
        spec(127, 127, 4, 2, 128),
        spec(129, 129, 4, 1, 64),
        spec(65, 200, 4, 4, 128),
        spec(200, 200, 4, 2, 128, sliding_window=33),
        spec(128, 128, 4, 2, 128, causal=False),
        spec(100, 100, 4, 2, 80),
        spec(130, 130, 2, 1, 256),
    )


def _quantized() -> tuple[KernelSpec, ...]:
    def spec(M: int, N: int, K: int, **kind: Any) -> KernelSpec:
        def arguments() -> tuple[Any, ...]:
            keys = jax.random.split(jax.random.key(3), 2)
            matrix = jax.random.normal(keys[1], (N, K), jnp.float32) * K**-0.5
            return jax.random.normal(keys[0], (M, K), jnp.bfloat16), quantize_weight(matrix, **kind)

        name = f"edge/M{M}_N{N}_K{K}" + "".join(f"_{key}{value}" for key, value in kind.items())
        return KernelSpec(name, quantized_matmul, arguments, 2.0 * M * N * K, 1.0 * N * K)

    kinds = ({"bits": 8}, {"bits": 8, "float8": True}, {"bits": 4, "group": 128}, {"bits": 4, "group": 32})
    return tuple(spec(M, 256, 512, **kind) for kind in kinds for M in (1, 7, 64, 129))
