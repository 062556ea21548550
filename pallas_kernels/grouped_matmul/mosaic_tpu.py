"""The grouped product on TPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.tiles import power_of_two
from pallas_kernels.grouped_matmul.work import BLOCK, END, GROUP, START, make_items
from pallas_kernels.target import require_tpu

_READ = 4  # the group whose weights are in fast memory while an item runs


def grouped_matmul_mosaic_tpu(
    x: Float[Array, "T K"],
    weights: Float[Array, "E N K"],
    group_sizes: Int[Array, " E"],
    *,
    interpret: Any = False,
) -> Float[Array, "T N"]:
    """See `grouped_matmul`; algorithm, FLOPs and bytes of `grouped_rows_tpu`. Not measured on hardware.

    JAX's megablox `gmm` walks the same tiles; it leaves rows after the last group undefined and refuses
    a T that its tile does not divide, so it would need a copy and a select around it.

    Raises:
        NotImplementedError: not a TPU.
    """
    require_tpu(interpret)
    num_rows = x.shape[0]
    rows = power_of_two(-(-num_rows // weights.shape[0]), 16, 128)
    items, count = make_items(group_sizes, num_rows, rows)
    x = jnp.pad(x, ((0, -num_rows % rows), (0, 0)))
    out = grouped_rows_tpu(
        x, weights, items, count, name="grouped_matmul", block_rows=rows, out_dtype=x.dtype, interpret=interpret
    )
    return out[:num_rows]


def grouped_rows_tpu(
    x: Float[Array, "rows K"],
    weights: Float[Array, "G N K"],
    items: Int[Array, "W 4"],
    count: Int[Array, " 1"],
    *,
    name: str,
    block_rows: int,
    out_dtype: Any,
    base: Float[Array, "rows N"] | None = None,
    interpret: Any = False,
) -> Float[Array, "rows N"]:
    """Returns `base[r] + x[r] @ weights[g].T` for the rows r of each item (g = G: no product).

    One grid step an item, a tile of N and a step of K; the item list is prefetched into scalar memory and says which
    weights the pipeline fetches next, under the product of this step. Items of one block of rows follow each other,
    so the result stays in VMEM until all of them have written their rows. Idle items fetch nothing.

    FLOPs: 2 * block_rows * N * K an item. Bytes: the weights of an item's group, once an item and tile; x once an item
    and tile of N; the result once. VMEM: two tiles of each operand, at most 2 * (128 + 512) * 1024 * itemsize plus
    two results.
    """
    groups, width, depth = weights.shape
    block_n = next((size for size in (512, 256, 128) if width % size == 0), width)
    block_k = next((size for size in (1024, 512, 256, 128) if depth % size == 0), depth)
    k_steps = depth // block_k
    num_items = items.shape[0]
    group = items[:, GROUP]
    # Rows of no group keep the weights of the item before them: nothing is fetched for them.
    last = jnp.max(jnp.where(group < groups, group, 0))
    table = jnp.concatenate([items, jnp.where(group < groups, group, last)[:, None]], axis=1).T.reshape(-1)

    def column(table_ref: Any, name: int, item: Any) -> Any:
        return table_ref[name * num_items + item]

    def depth_of(item: Any, k: Any, table_ref: Any, count_ref: Any) -> Any:
        idle = (item >= count_ref[0]) | (column(table_ref, GROUP, item) >= groups)
        return jnp.where(idle, k_steps - 1, k)

    def kernel(table_ref: Any, count_ref: Any, x_ref: Any, w_ref: Any, *refs: Any) -> None:
        base_ref = refs[0] if base is not None else None
        out_ref, acc_ref = refs[-2:]
        item, k = pl.program_id(1), pl.program_id(2)
        block = column(table_ref, BLOCK, item)
        is_first = (item == 0) | (block != column(table_ref, BLOCK, jnp.maximum(item - 1, 0)))

        @pl.when(k == 0)
        def _clear() -> None:
            acc_ref[...] = jnp.zeros_like(acc_ref)

        @pl.when((item < count_ref[0]) & (column(table_ref, GROUP, item) < groups))
        def _add() -> None:
            acc_ref[...] += lax.dot_general(
                x_ref[...], w_ref[0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32,
                precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
            )  # fmt: skip

        @pl.when((k == k_steps - 1) & (item < count_ref[0]))
        def _write() -> None:
            row = block * block_rows + lax.broadcasted_iota(jnp.int32, (block_rows, block_n), 0)
            mine = (row >= column(table_ref, START, item)) & (row < column(table_ref, END, item))
            value = acc_ref[...]
            if base_ref is not None:
                value = value + base_ref[...].astype(jnp.float32)
            others = jnp.where(is_first, jnp.zeros_like(value), out_ref[...].astype(jnp.float32))
            out_ref[...] = jnp.where(mine, value, others).astype(out_dtype)

    def result_map(n: Any, item: Any, k: Any, table_ref: Any, count_ref: Any) -> tuple[Any, Any]:
        return column(table_ref, BLOCK, item), n

    def x_map(n: Any, item: Any, k: Any, table_ref: Any, count_ref: Any) -> tuple[Any, Any]:
        return column(table_ref, BLOCK, item), depth_of(item, k, table_ref, count_ref)

    def w_map(n: Any, item: Any, k: Any, table_ref: Any, count_ref: Any) -> tuple[Any, Any, Any]:
        return column(table_ref, _READ, item), n, depth_of(item, k, table_ref, count_ref)

    in_specs = [pl.BlockSpec((block_rows, block_k), x_map), pl.BlockSpec((1, block_n, block_k), w_map)]
    if base is not None:
        in_specs.append(pl.BlockSpec((block_rows, block_n), result_map))
    call = functools.partial(
        pl.pallas_call,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(width // block_n, num_items, k_steps),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((block_rows, block_n), result_map),
            scratch_shapes=[pltpu.VMEM((block_rows, block_n), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), out_dtype),
        interpret=interpret,
        name=name,
    )
    return call(kernel)(table, count, x, weights, *([base] if base is not None else []))
