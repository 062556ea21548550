"""Chooses the implementation of an operation."""

from collections.abc import Callable, Mapping
from typing import Any


def dispatch(
    operation: str,
    implementations: Mapping[str, Callable[..., Any]],
    implementation: str | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns the result of one of `implementations`, which are listed fastest first.

    Args:
        operation: name used in error messages.
        implementations: name -> function; a function raises `NotImplementedError` to say "not this one".
        implementation: a name, whose own error is then raised as it is, or None to take the first that accepts.
        *args: passed on.
        **kwargs: passed on.

    Raises:
        ValueError: `implementation` is unknown.
        ExceptionGroup: None was given and every implementation declined.
    """
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"{operation}: unknown {implementation=}; choose from {sorted(implementations)} or None")
        return implementations[implementation](*args, **kwargs)
    refusals = []
    for function in implementations.values():
        try:
            return function(*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(refusal)
    raise ExceptionGroup(f"{operation}: no implementation accepts these arguments", refusals)
