"""Nested dicts to flat ones and back: {"a": {"b": x}} is {"a/b": x}."""

from collections.abc import Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves by path, depth first in the order of the dicts. ValueError on a key with a slash."""
    flat = {}
    for key, value in tree.items():
        if "/" in key:
            raise ValueError(f"wanted keys without '/', got {key!r} below {prefix!r}")
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict whose `flatten` is `flat`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, key = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = value
    return tree
