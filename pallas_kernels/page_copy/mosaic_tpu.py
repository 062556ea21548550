"""Page copies for TPU: asynchronous copies from HBM to HBM, all arrays in one kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from pallas_kernels.page_copy.reference import copy_pages_reference, gather_pages_reference, scatter_pages_reference
from pallas_kernels.target import require_tpu

IN_FLIGHT = 8  # entries whose copies are on their way at once


def copy_pages_mosaic_tpu(
    pages: Any,
    source: Int[Array, " C"],
    destination: Int[Array, " C"],
    *,
    disjoint: bool = False,
    interpret: Any = False,
) -> Any:
    """See `copy_pages`. One pass if `disjoint`, else a gather into a staging buffer and a scatter from it.

    One strided DMA moves a page of all heads of one array; `IN_FLIGHT` entries of all arrays are on their way at
    once, and no vector register touches the data. Arrays [K, P, n] (scales) are left to XLA: their pages are rows of
    a tile, at which a DMA cannot start.

    FLOPs: 0. Bytes: 2 * C * K * bytes of a page, twice that if not `disjoint`. VMEM: none. Not measured on hardware.

    Raises:
        NotImplementedError: not a TPU.
    """
    require_tpu(interpret)
    if not disjoint:
        staged = gather_pages_mosaic_tpu(pages, source, interpret=interpret)
        return scatter_pages_mosaic_tpu(pages, staged, destination, interpret=interpret)
    leaves, structure = jax.tree.flatten(pages)
    large, small = _split(leaves)
    large = _move(None, large, source, destination, interpret)
    return _join(structure, leaves, large, copy_pages_reference(small, source, destination))


def gather_pages_mosaic_tpu(pages: Any, source: Int[Array, " C"], *, interpret: Any = False) -> Any:
    """See `gather_pages` and `copy_pages_mosaic_tpu`."""
    require_tpu(interpret)
    leaves, structure = jax.tree.flatten(pages)
    large, small = _split(leaves)
    staged = [lax.empty((x.shape[0], source.shape[0], *x.shape[2:]), x.dtype) for x in large]
    moved = _move(large, staged, source, None, interpret)
    return _join(structure, leaves, moved, gather_pages_reference(small, source))


def scatter_pages_mosaic_tpu(pages: Any, staged: Any, destination: Int[Array, " C"], *, interpret: Any = False) -> Any:
    """See `scatter_pages` and `copy_pages_mosaic_tpu`."""
    require_tpu(interpret)
    leaves, structure = jax.tree.flatten(pages)
    (large, small), (new, new_small) = _split(leaves), _split(jax.tree.leaves(staged))
    moved = _move(new, large, None, destination, interpret)
    return _join(structure, leaves, moved, scatter_pages_reference(small, new_small, destination))


def _split(leaves: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    return [x for x in leaves if x.ndim >= 4], [x for x in leaves if x.ndim < 4]


def _join(structure: Any, leaves: list[jax.Array], large: list[jax.Array], small: list[jax.Array]) -> Any:
    remaining = iter(large), iter(small)
    return jax.tree.unflatten(structure, [next(remaining[x.ndim < 4]) for x in leaves])


def _move(
    sources: list[jax.Array] | None, targets: list[jax.Array], source: jax.Array | None,
    destination: jax.Array | None, interpret: Any,
) -> list[jax.Array]:  # fmt: skip
    """Copies page source[i] of every source (None: the targets) to page destination[i]; None there is page i."""
    if not targets:
        return []
    indices = [x.astype(jnp.int32) for x in (source, destination) if x is not None]
    inputs = [*(sources or []), *targets]
    count = indices[0].shape[0]

    def kernel(*refs: Any) -> None:
        ids, refs = refs[: len(indices)], refs[len(indices) :]
        outputs, done = refs[len(inputs) : -1], refs[-1]
        from_refs = outputs if sources is None else refs[: len(sources)]

        def each(i: Any, action: str) -> None:
            from_page = i if source is None else ids[0][i]
            to_page = i if destination is None else ids[-1][i]

            def run() -> None:
                for n, (a, b) in enumerate(zip(from_refs, outputs)):
                    getattr(pltpu.make_async_copy(a.at[:, from_page], b.at[:, to_page], done.at[n]), action)()

            if destination is None:
                run()
            else:
                pl.when(to_page > 0)(run)

        def step(i: Any, _: None) -> None:
            pl.when(i < count)(lambda: each(i, "start"))
            pl.when(i >= IN_FLIGHT)(lambda: each(i - IN_FLIGHT, "wait"))

        lax.fori_loop(0, count + IN_FLIGHT, step, None)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    first = len(indices) + len(sources or [])
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(indices),
            grid=(1,),
            in_specs=[anywhere] * len(inputs),
            out_specs=[anywhere] * len(targets),
            scratch_shapes=[pltpu.SemaphoreType.DMA((len(targets),))],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in targets],
        input_output_aliases={first + i: i for i in range(len(targets))},
        interpret=interpret,
        name="page_copy" if sources is None else "page_gather" if destination is None else "page_scatter",
    )(*indices, *inputs)
