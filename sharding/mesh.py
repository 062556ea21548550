"""Device meshes with named axes."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType


def make_mesh(
    *,
    data: int = 1,
    model: int = 1,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> jax.sharding.Mesh:
    """Returns a mesh with axes "data" and "model", of Auto type: the compiler propagates shardings through jit.

    Args:
        data: replicas of the weights.
        model: devices that share each matrix (tensor parallelism).
        devices: None takes the first `data * model` devices.

    Raises:
        ValueError: a size is not positive, or there are not enough devices.
    """
    needed = data * model
    devices = jax.devices() if devices is None else devices
    if min(data, model) < 1:
        raise ValueError(f"mesh sizes must be at least 1, got data={data} x model={model}")
    if needed > len(devices):
        raise ValueError(f"a mesh of data={data} x model={model} needs {needed} devices, there are {len(devices)}")
    return jax.make_mesh((data, model), ("data", "model"), (AxisType.Auto,) * 2, devices=devices[:needed])
