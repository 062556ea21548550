"""Validation of single values, with errors that say what was wanted and what was got; no jax."""

import math
import numbers
from collections.abc import Sequence


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Returns `value` as an int in [low, high]; a bool, a float or a str is a ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    number = int(value)
    if number < low or (high is not None and number > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {wanted}, got {number}")
    return number


def real(name: str, value: object, low: float, high: float = math.inf) -> float:
    """Returns `value` as a finite float in [low, high]; a bool or a str is a ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        wanted = f"finite and at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be {wanted}, got {number}")
    return number


def boolean(name: str, value: object) -> bool:
    """Returns `value` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def strings(name: str, value: object) -> tuple[str, ...]:
    """Returns a str or a sequence of str as a tuple of non-empty strings."""
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Sequence) or isinstance(items, bytes):
        raise ValueError(f"{name} must be a str or a sequence of str, got {value!r} ({type(value).__name__})")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{name} must hold only str, got {item!r} ({type(item).__name__})")
        if not item:
            raise ValueError(f"{name} must not hold an empty string, got {value!r}")
    return tuple(items)


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Returns a sequence of token ids as a tuple of non-negative ints."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise ValueError(f"{name} must be a sequence of ints, got {value!r} ({type(value).__name__})")
    return tuple(integer(f"an id in {name}", item, 0) for item in value)
