"""Trees of logical axes to trees of shardings."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from sharding.rules import AxisRules


def tree_shardings(abstract: Any, axes: Any, mesh: Mesh, rules: AxisRules) -> Any:
    """Returns a tree of NamedSharding.

    Args:
        abstract: tree of arrays or ShapeDtypeStructs.
        axes: tree of the same form whose leaves are tuples of logical axis names.
        mesh: the devices.
        rules: logical axes to mesh axes.

    Raises:
        ValueError: a rule names no axis of the mesh, or a dimension does not divide; the message names the leaf.
    """

    def one(path: Any, leaf: Any, names: tuple[str, ...]) -> NamedSharding:
        spec = rules.spec(names)
        for name, size, mesh_axis in zip(names, leaf.shape, spec):
            if mesh_axis is None:
                continue
            where = f"dimension {name!r} of {jax.tree_util.keystr(path, simple=True, separator='/')}"
            if mesh_axis not in mesh.shape:
                raise ValueError(f"{where}: the mesh has no axis {mesh_axis!r}, only {', '.join(mesh.axis_names)}")
            if size % mesh.shape[mesh_axis]:
                raise ValueError(
                    f"{where} has size {size}, which does not divide by the {mesh.shape[mesh_axis]} devices of mesh "
                    f"axis {mesh_axis!r}; use a smaller mesh, or AxisRules({name}=None)"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, abstract, axes)
