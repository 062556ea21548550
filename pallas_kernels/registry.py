"""The operations of this package by name, imported when they are asked for.

An operation is a folder with `api.py` (its `IMPLEMENTATIONS`, fastest first) and `specs.py` (its `SPECS`): a new
folder is found, nothing has to be listed.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import jax

import pallas_kernels
from pallas_kernels.dispatch import refusal
from pallas_kernels.specs import KernelSpec


def operations() -> tuple[str, ...]:
    """Returns the names of all operations; imports none of their backends."""
    packages = [module.name for module in pkgutil.iter_modules(pallas_kernels.__path__) if module.ispkg]
    return tuple(name for name in packages if {"api", "specs"} <= _modules_of(name))


def implementations(operation: str) -> Mapping[str, Callable[..., Any]]:
    """Returns the implementations of an operation, fastest first.

    Raises:
        ValueError: there is no such operation.
    """
    return _module(operation, "api").IMPLEMENTATIONS


def specs(operation: str) -> tuple[KernelSpec, ...]:
    """Returns the named cases of an operation.

    Raises:
        ValueError: there is no such operation.
    """
    return tuple(_module(operation, "specs").SPECS)


def find_spec(operation: str, case: str) -> KernelSpec:
    """Returns one case of an operation.

    Raises:
        ValueError: there is no such operation or case.
    """
    cases = {spec.name: spec for spec in specs(operation)}
    if case not in cases:
        raise ValueError(f"{operation} has no case {case!r}; its cases are {', '.join(cases)}")
    return cases[case]


def explain_case(operation: str, spec: KernelSpec) -> dict[str, str | None]:
    """Returns, for each implementation in order, why it declines the case on the current target; None: it takes it.

    The first None is what `implementation=None` takes. Nothing runs and nothing is allocated.
    """
    arguments = jax.eval_shape(spec.arguments)
    return {
        name: refusal(functools.partial(spec.function, implementation=name), *arguments)
        for name in implementations(operation)
    }


def _modules_of(operation: str) -> set[str]:
    package = importlib.import_module(f"pallas_kernels.{operation}")
    return {module.name for module in pkgutil.iter_modules(package.__path__)}


def _module(operation: str, name: str) -> Any:
    if operation not in operations():
        raise ValueError(f"unknown operation {operation!r}; there are {', '.join(operations()) or 'none'}")
    return importlib.import_module(f"pallas_kernels.{operation}.{name}")
