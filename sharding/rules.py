"""Logical axis rules: which mesh axis, if any, each named dimension of a parameter is split over."""

import dataclasses

from jax.sharding import PartitionSpec


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Mesh axis of every logical axis, None for not split. The defaults are Megatron's tensor parallelism."""

    vocab: str | None = "model"
    embed: str | None = None
    heads: str | None = "model"
    kv_heads: str | None = "model"
    head_dim: str | None = None
    mlp: str | None = "model"

    def spec(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the PartitionSpec of an array with these logical axes.

        Raises:
            ValueError: an axis is unknown, or two dimensions would be split over one mesh axis.
        """
        known = [field.name for field in dataclasses.fields(self)]
        unknown = [axis for axis in axes if axis not in known]
        if unknown:
            raise ValueError(f"unknown logical axes {unknown} in {axes}; known are {', '.join(known)}")
        mesh_axes = [getattr(self, axis) for axis in axes]
        used = [axis for axis in mesh_axes if axis is not None]
        if len(used) != len(set(used)):
            raise ValueError(f"two dimensions of {axes} map to the same mesh axis: {mesh_axes}")
        return PartitionSpec(*mesh_axes)
