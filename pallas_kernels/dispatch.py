"""Chooses the implementation of an operation."""

from collections.abc import Callable, Mapping
from typing import Any

import jax


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


def explain(implementations: Mapping[str, Callable[..., Any]], *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """Returns what `dispatch` would find, without running anything: why each implementation declines, in order.

    None is the entry of one that would take the arguments; the first of these is what `implementation=None` takes.

    Args:
        implementations: name -> function, fastest first.
        *args: what the operation would be called with; arrays or their ShapeDtypeStructs.
        **kwargs: likewise.
    """
    return {name: refusal(function, *args, **kwargs) for name, function in implementations.items()}


def chosen(reasons: Mapping[str, str | None]) -> str | None:
    """Returns the implementation that `dispatch` would take given what `explain` returned; None if all decline."""
    return next((name for name, reason in reasons.items() if reason is None), None)


def refusal(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """Returns why `function` declines these arguments (its NotImplementedError), or None if it takes them.

    Only traces it. Any other error is raised: it is a mistake in the arguments, or a bug, not a refusal.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        merged = [next(rest) if array else leaf for leaf, array in zip(leaves, is_array)]
        merged_args, merged_kwargs = jax.tree.unflatten(structure, merged)
        return function(*merged_args, **merged_kwargs)

    try:
        jax.eval_shape(call, [leaf for leaf, array in zip(leaves, is_array) if array])
    except NotImplementedError as reason:
        return str(reason) or type(reason).__name__
    return None
