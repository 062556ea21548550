"""Public functions of the page copies: shape checks and dispatch."""

from typing import Any

import jax
from jaxtyping import Array, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.page_copy.reference import (
    copy_pages_reference,
    gather_pages_reference,
    scatter_pages_reference,
)
from pallas_kernels.target import require_hopper, require_tpu


def _lazy(name: str, backend: str) -> Any:
    """Returns a function that imports its backend only when the device has it."""

    def call(*args: Any, interpret: Any = False, **kwargs: Any) -> Any:
        if backend == "mosaic_gpu":
            require_hopper(interpret)
            from pallas_kernels.page_copy import mosaic_gpu as module
        else:
            require_tpu(interpret)
            from pallas_kernels.page_copy import mosaic_tpu as module
        return getattr(module, f"{name}_{backend}")(*args, interpret=interpret, **kwargs)

    return call


def _implementations(name: str, reference: Any) -> dict[str, Any]:
    return {"mosaic_gpu": _lazy(name, "mosaic_gpu"), "mosaic_tpu": _lazy(name, "mosaic_tpu"), "xla": reference}


IMPLEMENTATIONS = _implementations("copy_pages", copy_pages_reference)
GATHER_IMPLEMENTATIONS = _implementations("gather_pages", gather_pages_reference)
SCATTER_IMPLEMENTATIONS = _implementations("scatter_pages", scatter_pages_reference)


def copy_pages(
    pages: Any,
    source: Int[Array, " C"],
    destination: Int[Array, " C"],
    *,
    disjoint: bool = False,
    implementation: str | None = None,
) -> Any:
    """Returns `pages` in which page `destination[i]` is the old page `source[i]`, for all i at once.

    All pages are read before any is written, so that a destination may be a source as well (a swap of two pages is
    source [a, b], destination [b, a]). In place when `pages` is donated.

    Args:
        pages: arrays or QuantizedPages, or any pytree of them (the pages of all layers): every leaf [K, P, ...],
            with one P.
        source: i32 pages to read.
        destination: i32 pages to write, distinct but for padding entries, which have 0 in both: page 0 is the
            null page, whose content nobody reads (some backends write it and some do not).
        disjoint: the caller's promise that, page 0 aside, no destination is a source. The kernels then copy in one
            pass and without a staging buffer; if the promise is broken, the result is undefined.
        implementation: "mosaic_gpu", "mosaic_tpu", "xla", or None for the first that accepts the arguments.

    Raises:
        ValueError: shapes do not fit together, or the implementation is unknown.
    """
    _check_pages(pages)
    if source.ndim != 1 or source.shape != destination.shape:
        raise ValueError(f"source and destination must have shape [C], got {source.shape} and {destination.shape}")
    return dispatch("copy_pages", IMPLEMENTATIONS, implementation, pages, source, destination, disjoint=disjoint)


def gather_pages(pages: Any, source: Int[Array, " C"], *, implementation: str | None = None) -> Any:
    """Returns the pages `source` one after the other: the pytree of `pages` with leaves [K, C, ...].

    The contiguous buffer that a swap moves to the host. Arguments and errors are those of `copy_pages`.
    """
    _check_pages(pages)
    if source.ndim != 1:
        raise ValueError(f"source must have shape [C], got {source.shape}")
    return dispatch("gather_pages", GATHER_IMPLEMENTATIONS, implementation, pages, source)


def scatter_pages(pages: Any, staged: Any, destination: Int[Array, " C"], *, implementation: str | None = None) -> Any:
    """Returns `pages` in which page `destination[i]` is `staged[:, i]`; in place when `pages` is donated.

    Args:
        pages: as for `copy_pages`.
        staged: what `gather_pages` returned: the same pytree with leaves [K, C, ...].
        destination: i32, distinct but for padding entries, which are 0, the null page.
        implementation: as for `copy_pages`.

    Raises:
        ValueError: shapes do not fit together, or the implementation is unknown.
    """
    _check_pages(pages)
    if destination.ndim != 1:
        raise ValueError(f"destination must have shape [C], got {destination.shape}")
    if jax.tree.structure(pages) != jax.tree.structure(staged):
        raise ValueError(
            f"staged must be a tree like pages, {jax.tree.structure(pages)}, got {jax.tree.structure(staged)}"
        )
    for array, new in zip(jax.tree.leaves(pages), jax.tree.leaves(staged)):
        wanted = (array.shape[0], destination.shape[0], *array.shape[2:])
        if new.shape != wanted or new.dtype != array.dtype:
            raise ValueError(
                f"staged pages of {array.dtype}{list(array.shape)} must be {array.dtype}{list(wanted)}, "
                f"got {new.dtype}{list(new.shape)}"
            )
    return dispatch("scatter_pages", SCATTER_IMPLEMENTATIONS, implementation, pages, staged, destination)


def _check_pages(pages: Any) -> None:
    leaves = jax.tree.leaves(pages)
    counts = {leaf.shape[1] if leaf.ndim > 2 else None for leaf in leaves}
    if len(counts) != 1 or None in counts:
        raise ValueError(f"pages must be arrays [K, P, ...] with one P, got {[leaf.shape for leaf in leaves]}")
