"""Lowering for machines that are not there."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

DEVICES = {
    "h200": AbstractDevice("NVIDIA H200", 132, "gpu"),
    "b200": AbstractDevice("NVIDIA B200", 148, "gpu"),
    "a100": AbstractDevice("NVIDIA A100", 108, "gpu"),
    "v5e": AbstractDevice("TPU v5 lite", 1, "tpu"),
    "v6e": AbstractDevice("TPU v6 lite", 1, "tpu"),
}


@contextlib.contextmanager
def targeting(name: str) -> Iterator[None]:
    """Makes `current_target` (and Pallas) see device `name` of `DEVICES`."""
    with use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=DEVICES[name])):
        yield


def lower(function: Callable[..., Any], *arguments: Any, target: str) -> str:
    """Returns the module of `function` for `target`, in which the kernel is machine code or Mosaic."""
    platform = {"gpu": "cuda"}.get(DEVICES[target].platform, DEVICES[target].platform)
    with targeting(target):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
