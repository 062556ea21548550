"""Measured roofs of the card, and the kernels beside them and beside what others offer."""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.bench.gpu.timing import time_device, time_host
from pallas_kernels import registry
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.quantized_matmul import quantize_weight, quantized_matmul

type Items = Iterator[tuple[str, Callable[[], dict[str, Any]]]]

LLAMA_8B = {"N": 32, "K": 8, "H": 128}


def roof_items(dry_run: bool) -> Items:
    """Yields the copy bandwidth and the bf16 matrix product peak, which later sections are compared with."""
    yield "copy", functools.partial(_copy, 2**20 if dry_run else 2**31)
    for size in (128,) if dry_run else (8192, 4096):
        yield f"bf16 matmul {size}", functools.partial(_matmul, size)


def _copy(num_bytes: int) -> dict[str, Any]:
    x = jnp.arange(num_bytes // 4, dtype=jnp.int32)
    return time_device(lambda x: x + 1, x).as_data(bytes_per_s=2.0 * num_bytes)


def _matmul(size: int) -> dict[str, Any]:
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    return time_device(jnp.matmul, a, b).as_data(flops_per_s=2.0 * size**3)


def decode_items(dry_run: bool) -> Items:
    """Yields paged attention of one token a row; bytes are the keys and values read once."""
    sizes = ((1, 131072), (8, 16384), (32, 8192), (128, 4096), (256, 1024))
    for page_size in (16, 64):
        for rows, keys in ((1, 64), (4, 128)) if dry_run else sizes:
            name = f"{rows} x {keys}, pages of {page_size}"
            yield name, functools.partial(_decode, rows, keys, page_size, "xla" if dry_run else None)


def _decode(rows: int, keys: int, page_size: int, implementation: str | None) -> dict[str, Any]:
    N, K, H = LLAMA_8B.values()
    pages = rows * keys // page_size
    key = jax.random.key(0)
    q = jax.random.normal(key, (rows, N, H), jnp.bfloat16)
    k, v = (jnp.full((K, pages + 1, page_size, H), 0.01 * i, jnp.bfloat16) for i in (1, 2))
    table = jax.random.permutation(key, jnp.arange(1, pages + 1, dtype=jnp.int32)).reshape(rows, -1)
    lens = jnp.full(rows, keys, jnp.int32)
    run = functools.partial(ragged_paged_attention, scale=H**-0.5, implementation=implementation)
    timing = time_device(
        lambda *arrays: run(*arrays, num_decode_rows=None), q, k, v, table, lens, jnp.arange(rows + 1, dtype=jnp.int32)
    )
    return timing.as_data(bytes_per_s=4.0 * rows * keys * K * H)


def flash_items(dry_run: bool) -> Items:
    """Yields causal attention: ours, cuDNN through jax.nn, PyTorch where it is installed."""
    sizes = ((1, 4096), (1, 16384), (8, 2048))
    for batch, length in ((1, 128),) if dry_run else sizes:
        for H in (64,) if dry_run else (128, 64):
            for who in ("ours", "jax.nn cudnn", "torch SDPA"):
                yield f"{batch} x {length}, H {H}: {who}", functools.partial(_flash, who, batch, length, H, dry_run)


def _flash(who: str, batch: int, length: int, H: int, dry_run: bool) -> dict[str, Any]:
    N, K = (4, 2) if dry_run else (32, 8)
    flops = 4.0 * batch * N * H * length * (length + 1) / 2
    if who == "torch SDPA":
        return _torch_flash(batch, length, N, K, H, flops)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (batch, length, n, H), jnp.bfloat16) for key, n in zip(keys, (N, K, K)))
    if who == "ours":
        run = functools.partial(flash_attention, causal=True, implementation="xla" if dry_run else "mosaic_gpu")
    else:
        name = "xla" if dry_run else "cudnn"
        run = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=name)
    return time_device(run, q, k, v).as_data(flops_per_s=flops)


def _torch_flash(batch: int, length: int, N: int, K: int, H: int, flops: float) -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
    except ImportError as missing:
        raise NotImplementedError("torch is not installed here") from missing
    if not torch.cuda.is_available():
        raise NotImplementedError("torch sees no GPU here")
    shapes = [(batch, n, length, H) for n in (N, K, K)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)

    def run() -> None:
        for _ in range(16):
            attend(q, k, v)
        torch.cuda.synchronize()

    return time_host(run, calls=16).as_data(flops_per_s=flops)


def quantized_items(dry_run: bool) -> Items:
    """Yields matrix products with the MLP matrix of an 8B model: bf16, then each kind of quantized weight."""
    kinds: dict[str, dict[str, Any]] = {
        "bf16": {}, "int8": {"bits": 8}, "int4 g128": {"bits": 4, "group": 128}, "fp8": {"bits": 8, "float8": True},
    }  # fmt: skip
    for M in (1, 4) if dry_run else (1, 16, 64, 2048):
        for kind, options in kinds.items():
            yield f"M {M}: {kind}", functools.partial(_quantized, M, options, dry_run)


def _quantized(M: int, options: dict[str, Any], dry_run: bool) -> dict[str, Any]:
    N, K = (256, 512) if dry_run else (14336, 4096)
    x = jax.random.normal(jax.random.key(0), (M, K), jnp.bfloat16)
    matrix = jax.random.normal(jax.random.key(1), (N, K), jnp.bfloat16)
    flops = 2.0 * M * N * K
    if not options:
        return time_device(lambda x, w: x @ w.T, x, matrix).as_data(flops_per_s=flops, bytes_per_s=2.0 * N * K)
    weight = jax.jit(functools.partial(quantize_weight, **options))(matrix)
    run = functools.partial(quantized_matmul, implementation="xla" if dry_run else None)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    return time_device(run, x, weight).as_data(flops_per_s=flops, bytes_per_s=float(num_bytes))


def spec_items(dry_run: bool) -> Items:
    """Yields the time of every spec of every operation, with the implementation that is taken by itself."""
    for operation in () if dry_run else registry.operations():
        for spec in registry.specs(operation):
            yield f"{operation}: {spec.name}", functools.partial(_spec, spec)


def _spec(spec: Any) -> dict[str, Any]:
    timing = time_device(spec.function, *jax.jit(spec.arguments)(), inner=4, repeats=5)
    return timing.as_data(flops_per_s=spec.flops, bytes_per_s=spec.num_bytes)
