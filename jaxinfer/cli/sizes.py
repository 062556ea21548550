"""Sizes of memory, read and written."""

from typing import Any

import click

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str, name: str = "memory") -> int:
    """Returns the bytes of "80GB" (10**9), "24GiB" (2**30) or a plain number.

    Raises:
        ValueError: not such a text; `name` says of what.
    """
    given = text.strip().lower()
    digits = given.rstrip("abcdefghijklmnopqrstuvwxyz ")
    try:
        size = float(digits) * _UNITS[given[len(digits) :].strip()]
        if not 0 <= size < 2**63:
            raise ValueError
    except (ValueError, KeyError):
        raise ValueError(f"{name} must be a number with a unit such as 24GB or 16GiB, got {text!r}") from None
    return int(size)


def format_size(num_bytes: int) -> str:
    """Returns the bytes in the largest binary unit of which there is one."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


class _Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value, "it")
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()  # an option that is a size
