"""Page copies for Hopper: every page through shared memory by TMA, several arrays a launch."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.page_copy.tiles import TileConfig, choose_tiles
from pallas_kernels.target import require_hopper


def copy_pages_mosaic_gpu(
    pages: Any,
    source: Int[Array, " C"],
    destination: Int[Array, " C"],
    *,
    disjoint: bool = False,
    interpret: Any = False,
) -> Any:
    """See `copy_pages`. One pass if `disjoint`, else a gather into a staging buffer and a scatter from it.

    Each block moves one page of one head (or a part of it) of up to `arrays` arrays of one shape: all parts are on
    their way by TMA at once, and each leaves for its new place as soon as it has come. No register touches the data.
    Entries whose destination is the null page are skipped, so that no two blocks write one place.

    FLOPs: 0. Bytes: 2 * C * K * bytes of a page, twice that if not `disjoint`.
    Tiles: see `choose_tiles`; shared memory at most 64 KiB, three blocks an SM.
    Expected on H200: 32 pages x 32 layers x (K and V) x 8 heads x 4 KiB move 134 MB, 28 us at 4.8 TB/s, in 8
    launches; 80 % of that for large copies, bound by the launches for a few pages. Not measured on hardware.

    Raises:
        NotImplementedError: not a Hopper GPU, or pages whose bytes are not a multiple of 16.
    """
    require_hopper(interpret)
    if not disjoint:
        staged = gather_pages_mosaic_gpu(pages, source, interpret=interpret)
        return scatter_pages_mosaic_gpu(pages, staged, destination, interpret=interpret)
    leaves, structure = jax.tree.flatten(pages)
    refs = [jax.new_ref(_Page.of(leaf).flatten(leaf)) for leaf in leaves]
    _move(leaves, leaves, refs, refs, source, destination, interpret)
    return jax.tree.unflatten(structure, [jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, leaves)])


def gather_pages_mosaic_gpu(pages: Any, source: Int[Array, " C"], *, interpret: Any = False) -> Any:
    """See `gather_pages` and `copy_pages_mosaic_gpu`."""
    require_hopper(interpret)
    leaves, structure = jax.tree.flatten(pages)
    staged = [jax.ShapeDtypeStruct((x.shape[0], source.shape[0], *x.shape[2:]), x.dtype) for x in leaves]
    refs = [jax.new_ref(jax.lax.empty(_Page.of(x).flat_shape(x), x.dtype)) for x in staged]
    inputs = [_Page.of(leaf).flatten(leaf) for leaf in leaves]
    _move(leaves, staged, inputs, refs, source, None, interpret)
    return jax.tree.unflatten(structure, [jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, staged)])


def scatter_pages_mosaic_gpu(pages: Any, staged: Any, destination: Int[Array, " C"], *, interpret: Any = False) -> Any:
    """See `scatter_pages` and `copy_pages_mosaic_gpu`."""
    require_hopper(interpret)
    leaves, structure = jax.tree.flatten(pages)
    new = jax.tree.leaves(staged)
    refs = [jax.new_ref(_Page.of(leaf).flatten(leaf)) for leaf in leaves]
    _move(new, leaves, [_Page.of(x).flatten(x) for x in new], refs, None, destination, interpret)
    return jax.tree.unflatten(structure, [jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, leaves)])


@dataclasses.dataclass(frozen=True)
class _Page:
    """One page of one head as the rectangle [rows, columns] that TMA moves."""

    rows: int
    columns: int
    dtype: Any

    @classmethod
    def of(cls, array: Any) -> "_Page":
        size, dtype = math.prod(array.shape[2:]), jnp.dtype(array.dtype)
        aligned = (c for c in range(min(size, 256), 0, -1) if size % c == 0 and c * dtype.itemsize % 16 == 0)
        columns = next(aligned, None)
        if columns is None:
            raise NotImplementedError(
                f"mosaic_gpu: pages of {dtype}{list(array.shape[2:])}; the copy engine moves multiples of 16 bytes"
            )
        return cls(size // columns, columns, dtype)

    def flat_shape(self, array: Any) -> tuple[int, int]:
        return (array.shape[0] * array.shape[1] * self.rows, self.columns)

    def flatten(self, array: jax.Array) -> jax.Array:
        return array.reshape(self.flat_shape(array))


def _move(
    source_leaves: Any, target_leaves: Any, sources: list[Any], targets: list[Any], source: jax.Array | None,
    destination: jax.Array | None, interpret: Any,
) -> None:  # fmt: skip
    """Copies page source[i] of every source to page destination[i] of its target; None stands for page i."""
    groups: dict[Any, list[int]] = {}
    for i, (a, b) in enumerate(zip(source_leaves, target_leaves)):
        groups.setdefault((_Page.of(a), a.shape[:2], b.shape[:2]), []).append(i)
    for (page, from_shape, to_shape), members in groups.items():
        tiles = choose_tiles(page.rows, page.columns * page.dtype.itemsize)
        for start in range(0, len(members), tiles.arrays):
            part = members[start : start + tiles.arrays]
            _launch(
                page, tiles, from_shape, to_shape, [sources[i] for i in part], [targets[i] for i in part], source,
                destination, interpret,
            )  # fmt: skip


def _launch(
    page: _Page, tiles: TileConfig, from_shape: tuple[int, int], to_shape: tuple[int, int], sources: list[Any],
    targets: list[Any], source: jax.Array | None, destination: jax.Array | None, interpret: Any,
) -> None:  # fmt: skip
    in_place = sources[0] is targets[0]
    name = "page_copy" if in_place else "page_gather" if destination is None else "page_scatter"
    indices = [x.astype(jnp.int32) for x in (source, destination) if x is not None]

    def body(ids, *refs, stages, ready):
        ids, refs = list(ids), list(refs)
        to_refs = refs[-len(targets) :]
        from_refs = to_refs if in_place else refs[: len(sources)]
        entry, head, part = lax.axis_index("entry"), lax.axis_index("head"), lax.axis_index("part")
        from_page = entry if source is None else ids[0][entry]
        to_page = entry if destination is None else ids[-1][entry]

        def window(shape: tuple[int, int], number: Any) -> Any:
            return pl.ds(((head * shape[1] + number) * tiles.parts + part) * tiles.block_rows, tiles.block_rows)

        def move() -> None:
            for ref, stage, barrier in zip(from_refs, stages, ready):
                plgpu.copy_gmem_to_smem(ref.at[window(from_shape, from_page)], stage, barrier)
            for ref, stage, barrier in zip(to_refs, stages, ready):
                plgpu.barrier_wait(barrier)
                plgpu.copy_smem_to_gmem(stage, ref.at[window(to_shape, to_page)])
            plgpu.wait_smem_to_gmem(0)

        if destination is None:
            move()
        else:
            pl.when(to_page > 0)(move)

    plgpu.kernel(
        body,
        out_type=(),
        grid=((source if source is not None else indices[0]).shape[0], from_shape[0], tiles.parts),
        grid_names=("entry", "head", "part"),
        scratch_types={
            "stages": [plgpu.SMEM((tiles.block_rows, page.columns), page.dtype) for _ in sources],
            "ready": [plgpu.Barrier() for _ in sources],
        },
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name=name,
    )(indices, *([] if in_place else sources), *targets)
