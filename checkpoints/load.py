"""Loads a source into a parameter tree: strict about names and shapes, lazy, straight onto the devices."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.sources import PackedSource, TensorSource, aligned_empty
from checkpoints.trees import flatten, unflatten

WORKERS = 2  # tensors read ahead while another is placed; each holds one tensor
SHOWN = 10  # problems of a kind named in a message


@dataclass(frozen=True)
class Target:
    """Where a source tensor goes.

    Attributes:
        path: the leaf, "layers_0/attention/q/weight".
        transform: applied to the stored array before the cast. It may return a view and must not write to its
            argument. A slice here takes one part of a fused tensor. None: the shapes must already agree.
        pack: makes the leaf, a pytree of host arrays with the leaf's `shape`, of what `transform` returns; there is
            then no cast. None: the leaf is the array.
        raw: the stored array is the file's own bytes, [out, bytes a row] (`GGUFFile.read_packed`).
    """

    path: str
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    pack: Callable[[np.ndarray], Any] | None = None
    raw: bool = False


type Plan = Mapping[str, Target | Sequence[Target]]
type Placed = tuple[str, Any]  # a leaf and its host array, or a pytree of them


def load_tree(
    source: TensorSource,
    plan: Plan,
    abstract: Mapping[str, Any],
    *,
    ignore: Sequence[str] = (),
    shardings: Any = None,
    dtype: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Reads every leaf of `abstract` from `source`, each exactly once.

    Tensors are read, transformed and cast in two threads while the main thread places finished ones, so that
    host memory holds two or three tensors beyond the result. On CPU an array whose memory is 64-byte aligned
    is taken without a copy: a file read in its own dtype then stays memory mapped (do not overwrite it).

    Args:
        source: an open source.
        plan: source tensor name to the leaf, or leaves, that it fills.
        abstract: nested dict of jax.ShapeDtypeStruct; wanted shapes, dtypes and, if set, shardings.
        ignore: regular expressions; source tensors that fully match one and are not in `plan` are skipped.
        shardings: one jax.sharding.Sharding for all leaves, or a nested dict like `abstract`. None: each
            leaf's own, or the default device.
        dtype: replaces the dtype of all floating leaves.
        progress: called in this thread with (bytes placed, bytes in all), in the leaves' dtypes.

    Returns:
        A nested dict like `abstract` of jax.Array, or of what a target's `pack` made.

    Raises:
        ValueError: plan, source, tree or shardings disagree; all that is found before reading is one message.
    """
    leaves = {path: _with_dtype(leaf, dtype) for path, leaf in flatten(abstract).items()}
    placements = _placements(leaves, shardings)
    jobs = {name: (targets,) if isinstance(targets, Target) else tuple(targets) for name, targets in plan.items()}
    _check(source, jobs, leaves, placements, ignore)
    total = sum(_nbytes(leaf) for leaf in leaves.values())
    done, result = 0, {}
    read = partial(_read, source, leaves)
    for placed in _read_ahead(read, jobs.items()):
        while placed:  # pop: the host array must be free before the next one is placed
            path, host = placed.pop()
            result[path] = _place(host, placements[path])
            done += _nbytes(leaves[path])
            del host
            if progress is not None:
                progress(done, total)
    return unflatten({path: result[path] for path in leaves})


def _with_dtype(leaf: jax.ShapeDtypeStruct, dtype: Any) -> jax.ShapeDtypeStruct:
    if dtype is None or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return leaf.update(dtype=jnp.dtype(dtype))


def _nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def _placements(leaves: dict[str, jax.ShapeDtypeStruct], shardings: Any) -> dict[str, jax.sharding.Sharding | None]:
    if shardings is None:
        return {path: leaf.sharding for path, leaf in leaves.items()}
    if isinstance(shardings, jax.sharding.Sharding):
        return dict.fromkeys(leaves, shardings)
    flat = flatten(shardings)
    if differing := sorted(flat.keys() ^ leaves.keys()):
        raise ValueError(f"shardings and abstract tree have different leaves: {_shown(differing)}")
    return flat


def _check(
    source: TensorSource,
    jobs: Mapping[str, tuple[Target, ...]],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    placements: Mapping[str, jax.sharding.Sharding | None],
    ignore: Sequence[str],
) -> None:
    """Raises one ValueError with all that disagrees, before anything is read."""
    names = set(source.names())
    filled = Counter(target.path for targets in jobs.values() for target in targets)
    skipped = re.compile("|".join(f"(?:{pattern})" for pattern in ignore) or r"(?!)")
    problems = {
        "tensors that the plan names and the source lacks": [name for name in jobs if name not in names],
        "source tensors that the plan does not name (add them to plan or ignore)": sorted(
            name for name in names - jobs.keys() if not skipped.fullmatch(name)
        ),
        "leaves that no source tensor fills": [path for path in leaves if path not in filled],
        "leaves that the tree does not have": [path for path in filled if path not in leaves],
        "leaves filled more than once": [path for path, count in filled.items() if count > 1],
        "wrong shapes": [
            f"{name} -> {target.path}: wanted {list(leaves[target.path].shape)}, got {list(source.spec(name).shape)}"
            for name, targets in jobs.items()
            for target in targets
            if name in names
            and target.path in leaves
            and target.transform is None
            and source.spec(name).shape != leaves[target.path].shape
        ],
        "shardings that do not fit": list(_bad_shardings(leaves, placements)),
    }
    lines = [f"  {len(found)} {kind}: {_shown(found)}" for kind, found in problems.items() if found]
    if lines:
        raise ValueError(f"{source.path} does not fit the model:\n" + "\n".join(lines))


def _bad_shardings(leaves: Mapping[str, Any], placements: Mapping[str, Any]) -> Iterator[str]:
    for path, leaf in leaves.items():
        if placements[path] is not None:
            try:
                placements[path].shard_shape(leaf.shape)
            except ValueError as error:
                yield f"{path}: {error}"


def _shown(found: Sequence[str]) -> str:
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _read(source: TensorSource, leaves: Mapping[str, Any], job: tuple[str, tuple[Target, ...]]) -> list[Placed]:
    """Reads one source tensor and makes the leaves' host arrays from it."""
    name, targets = job
    stored = {raw: _stored(source, name, raw) for raw in {target.raw for target in targets}}
    placed = [(target.path, _fit(stored[target.raw], name, target, leaves[target.path])) for target in targets]
    if isinstance(source, PackedSource) and all(target.pack is not None for target in targets):
        source.release(name)  # nothing points into the file any more
    return placed


def _stored(source: TensorSource, name: str, raw: bool) -> np.ndarray:
    if not raw:
        return source.read(name)
    if not isinstance(source, PackedSource):
        raise ValueError(f"{source.path}: the plan wants the packed bytes of {name}, and this format has none")
    return source.read_packed(name)[0]


def _fit(stored: np.ndarray, name: str, target: Target, leaf: jax.ShapeDtypeStruct) -> Any:
    array = stored if target.transform is None else target.transform(stored)
    where = f"{name} -> {target.path}"
    if target.pack is not None:
        packed = target.pack(array)
        if packed.shape != leaf.shape:
            raise ValueError(f"{where}: wanted shape {list(leaf.shape)}, got {list(packed.shape)} packed")
        return packed
    if array.shape != leaf.shape:
        raise ValueError(f"{where}: wanted shape {list(leaf.shape)}, got {list(array.shape)} after its transform")
    if array.dtype == leaf.dtype and array.flags.c_contiguous and array.flags.aligned:
        return array
    if jnp.issubdtype(array.dtype, jnp.floating) != jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(f"{where}: wanted {leaf.dtype}, got {array.dtype}; give a transform that converts it")
    result = aligned_empty(leaf.shape, np.dtype(leaf.dtype))
    np.copyto(result, array, casting="unsafe")
    return result


def _read_ahead[Job](read: Callable[[Job], list[Placed]], jobs: Iterable[Job]) -> Iterator[list[Placed]]:
    """Yields every `read(job)` as it becomes ready, with at most `WORKERS` running or waiting to be taken."""
    pending: set[Future[list[Placed]]] = set()
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="load_tree") as pool:
        for job in jobs:
            pending.add(pool.submit(read, job))
            while len(pending) >= WORKERS:
                ready, pending = wait(pending, return_when=FIRST_COMPLETED)
                while ready:
                    yield ready.pop().result()
        for future in as_completed(pending):
            yield future.result()


def _place(host: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Puts a leaf, an array or a pytree of them, where it belongs."""
    if sharding is None or len(sharding.device_set) == 1:
        return jax.device_put(host, sharding)  # once for all arrays of a packed leaf: a call costs 0.2 ms
    # Each device gets its slice only; of a memory map, only those pages are read.
    return jax.tree.map(lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__), host)
