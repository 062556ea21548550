"""Named cases of an operation, shared by tests, compile checks and benchmarks."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One case of an operation.

    `function(*arguments(), implementation=name)` runs it; `jax.eval_shape(arguments)` gives the shapes alone.
    `flops` and `num_bytes` are the least work and memory traffic of the case, from which its roofline follows;
    `peak` names the arithmetic whose peak rate bounds it ("bf16", "fp8", "int8").
    """

    name: str
    function: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    flops: float
    num_bytes: float
    peak: str = "bf16"
