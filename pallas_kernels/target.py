"""The device a kernel is traced for, and the refusals that follow from it."""

import dataclasses
import re
from typing import Any

import jax

# The machine code a GPU name stands for: enough to know what a kernel can use when only the name is known.
_COMPUTE_CAPABILITY = {
    r"B200|B100|GB200|B300": 10.0,
    r"H200|H100|H800|H20|GH200": 9.0,
    r"L40|L4|RTX 40": 8.9,
    r"A100|A800": 8.0,
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device: `platform` is "cpu", "gpu" or "tpu", `kind` its name, `compute_capability` that of an NVIDIA GPU."""

    platform: str
    kind: str
    compute_capability: float | None = None

    def __str__(self) -> str:
        capability = "" if self.compute_capability is None else f", compute capability {self.compute_capability}"
        return f"{self.platform} ({self.kind}{capability})"


def current_target() -> Target:
    """Returns the device of the abstract mesh in use (compilation for another machine), else the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Target(abstract.platform, abstract.device_kind, _capability(abstract.device_kind))
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    capability = getattr(device, "compute_capability", None)
    return Target(
        device.platform, device.device_kind, float(capability) if capability else _capability(device.device_kind)
    )


def require_hopper(interpret: Any) -> None:
    """Declines every device but a Hopper GPU (wgmma exists there alone), unless the kernel is interpreted.

    Raises:
        NotImplementedError: "not this implementation", with the reason.
    """
    target = current_target()
    if not interpret and not (target.platform == "gpu" and target.compute_capability == 9.0):
        raise NotImplementedError(
            f"mosaic_gpu needs a Hopper GPU (H100, H200: compute capability 9.0), this is {target}"
        )
    require_one_device("mosaic_gpu")


def require_tpu(interpret: Any) -> None:
    """Declines every device but a TPU, unless the kernel is interpreted.

    Raises:
        NotImplementedError: "not this implementation", with the reason.
    """
    target = current_target()
    if not interpret and target.platform != "tpu":
        raise NotImplementedError(f"mosaic_tpu needs a TPU, this is {target}")
    require_one_device("mosaic_tpu")


def require_one_device(name: str) -> None:
    """Declines a mesh over which the compiler would have to split the kernel; inside shard_map it need not."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes}
    if split := {axis: size for axis, size in axes.items() if size > 1}:
        raise NotImplementedError(f"{name} on a mesh of {split} must be called inside shard_map")


def _capability(kind: str) -> float | None:
    return next((value for names, value in _COMPUTE_CAPABILITY.items() if re.search(names, kind)), None)
