"""Every Mosaic GPU kernel on the device against the reference, at edge cases and at the shapes of its specs."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.bench.gpu.edges import edge_specs
from pallas_kernels import registry
from pallas_kernels.specs import KernelSpec

TOLERANCE = 2e-2  # of the largest reference value: outputs are bf16
REFERENCE_LIMIT = 24e9  # bytes of f32 scores that the reference may make; beyond, XLA's form is the reference

type Items = Iterator[tuple[str, Callable[[], dict[str, Any]]]]


def items(dry_run: bool) -> Items:
    """Yields edge cases of all operations, then the first spec of each, the second, ...; dry: XLA at edge cases."""
    name = "xla" if dry_run else "mosaic_gpu"
    edges = {operation: edge_specs(operation) for operation in registry.operations()}
    queues = [
        [(operation, spec) for spec in (*edges[operation], *(() if dry_run else registry.specs(operation)))]
        for operation in registry.operations()
        if name in registry.implementations(operation)
    ]
    for place in range(max(map(len, queues), default=0)):
        for queue in queues:
            if place < len(queue):
                operation, spec = queue[place]
                yield f"{operation}: {spec.name}", functools.partial(check, operation, spec, name)


def check(operation: str, spec: KernelSpec, implementation: str) -> dict[str, Any]:
    """Returns the largest difference to the reference over its largest value, and whether a second run is bit-equal."""
    arguments = jax.jit(spec.arguments)()
    run = jax.jit(functools.partial(spec.function, implementation=implementation))
    got, again = run(*arguments), run(*arguments)
    against, wanted = _reference(operation, spec, arguments)
    error = max(_error(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
    same = all(bool(_equal(a, b)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True))
    return {"difference": error, "ok": error <= TOLERANCE and same, "bit_equal": same, "against": against}


def _reference(operation: str, spec: KernelSpec, arguments: Any) -> tuple[str, Any]:
    names = [name for name in ("reference", "xla") if name in registry.implementations(operation)]
    if spec.flops > REFERENCE_LIMIT * 128:  # 4 H operations and 4 bytes of scores for a pair
        names.reverse()
    failures = []
    for name in names:
        try:
            with jax.default_matmul_precision("highest"):
                return name, jax.jit(functools.partial(spec.function, implementation=name))(*arguments)
        except Exception as failure:  # usually out of memory: the next one is leaner
            failures.append(failure)
    raise ExceptionGroup("no reference ran", failures)


def _error(got: jax.Array, wanted: jax.Array) -> float:
    a, b = (jnp.asarray(x).astype(jnp.float32) for x in (got, wanted))
    if a.size == 0:
        return 0.0
    difference = jnp.where((a == b) | (jnp.isnan(a) & jnp.isnan(b)), 0.0, jnp.abs(a - b))
    finite = jnp.where(jnp.isfinite(b), jnp.abs(b), 0.0)
    return float(jnp.nan_to_num(difference, nan=jnp.inf).max() / jnp.maximum(finite.max(), 1e-6))


def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.all((a == b) | ((a != a) & (b != b)))
