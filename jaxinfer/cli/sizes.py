"""Sizes of memory as people write them: 24GB, 512MiB."""

from typing import Any

import click

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int:
    """Returns the bytes that `text` says.

    Raises:
        ValueError: not a number with a unit.
    """
    digits = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(digits) :].strip()
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError):
        raise ValueError(f"memory must be a number with a unit such as 24GB or 16GiB, got {text!r}") from None


class _Size(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Size()  # an option that is a size
