"""The Mosaic GPU kernel under `grouped_matmul` and `lora_matmul`: sorted rows times the matrix of their group."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.tiles import TileConfig
from pallas_kernels.grouped_matmul.work import BLOCK, END, GROUP, START

plgpu: Any = mosaic_gpu  # its types are not exported
WARPGROUP_ROWS = 64  # M of wgmma


def grouped_rows(
    x: Float[Array, "rows K"],
    weights: Float[Array, "G N K"],
    items: Int[Array, "W 4"],
    count: Int[Array, " 1"],
    *,
    name: str,
    tiles: TileConfig,
    out_rows: int,
    out_dtype: Any,
    row_of: Int[Array, " rows"] | None = None,
    base: Float[Array, "out_rows N"] | None = None,
    interpret: Any = False,
) -> Float[Array, "splits out_rows N"]:
    """Returns `base[row_of[r]] + x[r] @ weights[g].T` in row `row_of[r]`, for the rows r of each item.

    Items of g = G have no product. Rows of the output that no item reaches are undefined. One block of threads an SM
    walks over units (an item, a tile of N, a part of K); one warpgroup fills rings of shared memory by TMA, running
    ahead over the ends of units, and one or two others multiply (warp specialization as in FlashAttention-3 and
    CUTLASS). Rows of a tile beyond the item's are computed and not stored; they cost nothing but tensor time.

    Args:
        x: rows sorted by group, padded to a multiple of `tiles.block_rows`.
        weights: one matrix [N, K] a group.
        items: work list of `make_items` with `tiles.block_rows`.
        count: how many items are real.
        name: of the kernel, for profiles.
        tiles: sizes; `block_n` divides N and `block_k * splits` divides K.
        out_rows: rows of the output.
        out_dtype: type of the output.
        row_of: the row of the output that each row belongs to; None is the same.
        base: added to the product, of the type of the output; None adds nothing.
        interpret: interpreter parameters, False on hardware.
    """
    t = tiles
    groups, width, depth = weights.shape
    rows = max(t.block_rows, WARPGROUP_ROWS)
    k_steps = depth // (t.block_k * t.splits)
    n_tiles = width // t.block_n
    by_rows = t.block_rows == 2 * WARPGROUP_ROWS
    num_consumers = t.consumers
    my_rows = rows // num_consumers if by_rows else rows
    my_cols = t.block_n if by_rows else t.block_n // num_consumers
    io_slots = t.io_slots
    io_cols = min(my_cols, 128)  # rows of an unswizzled buffer that wgmma's registers are stored to have at most 128
    parts = my_cols // io_cols

    def kernel(*refs: Any) -> None:
        x_gmem, w_gmem, items_gmem, count_gmem, *rest = refs
        row_gmem: Any = rest.pop(0) if row_of is not None else None
        base_gmem: Any = rest.pop(0) if base is not None else None
        out_gmem, x_smem, w_smem, io_smem, full, empty, io_full, io_empty = rest
        program, warpgroup = lax.axis_index("program"), lax.axis_index("warpgroup")
        num_items = count_gmem[0]
        units = num_items * (n_tiles * t.splits)
        my_units = lax.div(units - program + (t.programs - 1), t.programs)

        def unit(step: jax.Array) -> tuple[jax.Array, ...]:
            """Returns what unit `step` of this program is; all items of a tile of weights come first, for L2."""
            index = program + step * t.programs
            item, rest = lax.rem(index, num_items), lax.div(index, num_items)
            group = items_gmem[item, GROUP]
            block = pl.multiple_of(items_gmem[item, BLOCK] * t.block_rows, t.block_rows)
            col = pl.multiple_of(lax.rem(rest, n_tiles) * t.block_n, t.block_n)
            steps = jnp.where(group < groups, k_steps, 0)
            return group, block, items_gmem[item, START], items_gmem[item, END], col, lax.div(rest, n_tiles), steps

        def row_number(r: jax.Array) -> jax.Array:
            return r if row_gmem is None else row_gmem[r]

        @pl.when(warpgroup == num_consumers)
        def _produce() -> None:
            if num_consumers > 1:
                plgpu.set_max_registers(40, action="decrease")

            def fill(step: jax.Array, done: jax.Array) -> jax.Array:
                group, block, start, end, col, split, steps = unit(step)

                if base_gmem is not None:
                    io = lax.rem(step, io_slots)

                    @pl.when(step >= io_slots)
                    def _() -> None:
                        plgpu.barrier_wait(io_empty.at[io])

                    def load_row(i: jax.Array, _: tuple[()]) -> tuple[()]:
                        mine = (block + i >= start) & (block + i < end)

                        @pl.when(mine)
                        def _() -> None:
                            for tile in range(t.block_n // io_cols):
                                cols = pl.ds(pl.multiple_of(col + tile * io_cols, io_cols), io_cols)
                                source = base_gmem.at[pl.ds(row_number(block + i), 1), cols]
                                owner = lax.div(i, my_rows) if by_rows else tile // parts
                                row = lax.rem(i, my_rows) if by_rows else i
                                target = io_smem.at[io, owner, tile % parts, pl.ds(row, 1)]
                                plgpu.copy_gmem_to_smem(source, target, io_full.at[io])

                        @pl.when(~mine)
                        def _() -> None:  # the barrier counts every row of the tile
                            for _ in range(t.block_n // io_cols):
                                plgpu.barrier_arrive(io_full.at[io])

                        return ()

                    lax.fori_loop(0, t.block_rows, load_row, ())

                def load(k: jax.Array, done: jax.Array) -> jax.Array:
                    slot = lax.rem(done, t.stages)

                    @pl.when(done >= t.stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    ks = pl.ds(pl.multiple_of((split * k_steps + k) * t.block_k, t.block_k), t.block_k)
                    to = x_smem.at[slot] if t.block_rows == rows else x_smem.at[slot, pl.ds(0, t.block_rows)]
                    plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(block, t.block_rows), ks], to, full.at[slot])
                    plgpu.copy_gmem_to_smem(w_gmem.at[group, pl.ds(col, t.block_n), ks], w_smem.at[slot], full.at[slot])
                    return done + 1

                return lax.fori_loop(0, steps, load, done)

            lax.fori_loop(0, my_units, fill, jnp.int32(0))

        @pl.when(warpgroup < num_consumers)
        def _consume() -> None:
            if num_consumers > 1:
                plgpu.set_max_registers(232, action="increase")
            first_row = pl.multiple_of(warpgroup * my_rows, my_rows) if by_rows else 0
            first_col = 0 if by_rows or num_consumers == 1 else pl.multiple_of(warpgroup * my_cols, my_cols)
            at_rows = pl.ds(first_row, my_rows)
            at_cols = pl.ds(first_col, my_cols)

            def multiply(step: jax.Array, done: jax.Array) -> jax.Array:
                block, start, end, col, split, steps = unit(step)[1:]
                io = lax.rem(step, io_slots)

                def product(acc: Any) -> jax.Array:
                    def add(k: jax.Array, done: jax.Array) -> jax.Array:
                        slot = lax.rem(done, t.stages)
                        plgpu.barrier_wait(full.at[slot])
                        w = w_smem.at[slot, at_cols].transpose((1, 0))
                        plgpu.wgmma(acc, x_smem.at[slot, at_rows], w)
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def _() -> None:
                            plgpu.barrier_arrive(empty.at[lax.rem(done - 1, t.stages)])

                        return done + 1

                    last = lax.fori_loop(0, steps, add, done)
                    plgpu.wgmma_wait(0)

                    @pl.when(steps > 0)
                    def _() -> None:
                        plgpu.barrier_arrive(empty.at[lax.rem(last - 1, t.stages)])

                    return acc[...]

                result = pl.run_scoped(product, plgpu.ACC((my_rows, my_cols), jnp.float32))
                if base_gmem is None:
                    plgpu.wait_smem_to_gmem(io_slots - 1, wait_read_only=True)
                else:
                    plgpu.barrier_wait(io_full.at[io])
                for part in range(parts):
                    buffer = io_smem.at[io, warpgroup, part]
                    value = result[:, part * io_cols : (part + 1) * io_cols]
                    if base_gmem is not None:
                        old = plgpu.load(buffer, layout=plgpu.Layout.WGMMA, optimized=False)
                        value = value + old.astype(jnp.float32)
                    buffer[...] = value.astype(out_dtype)
                plgpu.commit_smem()

                low = jnp.maximum(start, block + first_row)
                high = jnp.minimum(end, block + first_row + my_rows)

                def store_row(r: jax.Array, _: tuple[()]) -> tuple[()]:
                    row = row_number(r)
                    for part in range(parts):
                        cols = pl.ds(pl.multiple_of(col + first_col + part * io_cols, io_cols), io_cols)
                        source = io_smem.at[io, warpgroup, part, pl.ds(r - block - first_row, 1)]
                        plgpu.copy_smem_to_gmem(source, out_gmem.at[split, pl.ds(row, 1), cols], commit_group=False)
                    return ()

                is_whole = (high - low == my_rows) & (row_gmem is None)

                @pl.when(is_whole)
                def _() -> None:
                    for part in range(parts):
                        cols = pl.ds(pl.multiple_of(col + first_col + part * io_cols, io_cols), io_cols)
                        target = out_gmem.at[split, pl.ds(low, my_rows), cols]
                        plgpu.copy_smem_to_gmem(io_smem.at[io, warpgroup, part], target, commit_group=False)

                lax.fori_loop(low, jnp.where(is_whole, low, high), store_row, ())
                plgpu.commit_smem_to_gmem_group()
                if base_gmem is not None:  # what this warpgroup stored `io_slots` - 1 units before may be overwritten
                    plgpu.wait_smem_to_gmem(io_slots - 1, wait_read_only=True)

                    @pl.when(step >= io_slots - 1)
                    def _() -> None:
                        plgpu.barrier_arrive(io_empty.at[lax.rem(step - (io_slots - 1), io_slots)])

                return done + steps

            lax.fori_loop(0, my_units, multiply, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    itemsize = jnp.dtype(x.dtype).itemsize
    swizzle = plgpu.find_swizzle(t.block_k * itemsize * 8)
    tiled = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    optional = [ref for ref in (row_of, base) if ref is not None]
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((t.splits, out_rows, width), out_dtype),
        grid=(t.programs,),
        grid_names=("program",),
        num_threads=num_consumers + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((t.stages, rows, t.block_k), x.dtype, transforms=tiled),
            plgpu.SMEM((t.stages, t.block_n, t.block_k), x.dtype, transforms=tiled),
            plgpu.SMEM((io_slots, num_consumers, parts, my_rows, io_cols), out_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=t.stages),
            plgpu.Barrier(num_arrivals=num_consumers, num_barriers=t.stages),
            plgpu.Barrier(num_arrivals=t.block_rows * (t.block_n // io_cols), num_barriers=io_slots),
            plgpu.Barrier(num_arrivals=num_consumers, num_barriers=io_slots),
        ],
        interpret=interpret,
        kernel_name=name,
    )(x, weights, items, count, *optional)
