"""Meshes of devices that are not there."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, use_abstract_mesh

from jaxinfer.compile_check.devices import Device

AXES = ("data", "model")
PLUGINS = {"gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}


def has_plugin(platform: str) -> bool:
    """Returns whether this interpreter has the compiler for "gpu" or "tpu"."""
    return any(importlib.util.find_spec(name) is not None for name in PLUGINS[platform])


def install_command(platform: str) -> str:
    """Returns how to make an environment with the compiler; it runs on a machine without the device.

    The versions are those of this process: the two halves of jax must agree.
    """
    version = jax.__version__
    if platform == "tpu":
        return f'python3 -m venv tpu && tpu/bin/pip install "jax[tpu]=={version}" flax jaxtyping'
    return (
        f"python3 -m venv cuda && cuda/bin/pip install jax=={version} flax jaxtyping absl-py && "
        f"cuda/bin/pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} "
        "(and a CUDA toolkit, or the wheels nvidia-cuda-nvcc and nvidia-nvvm)"
    )


def real_mesh(device: Device, num_devices: int) -> Mesh:
    """Returns a mesh that the compiler plugin can compile for.

    Raises:
        ValueError: this interpreter has no such plugin.
    """
    if not has_plugin(device.platform):
        raise ValueError(
            f"this Python has no compiler for {device.name} ({' or '.join(PLUGINS[device.platform])}); make an "
            f"environment that has: {install_command(device.platform)}"
        )
    from jax.experimental import topologies

    if device.platform == "gpu":
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=device.gpu_target_config(), topology=device.topology(num_devices)
        )
    else:
        topology = topologies.get_topology_desc(device.topology(num_devices), platform="tpu")
    devices = np.array(topology.devices[:num_devices]).reshape(1, num_devices)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)


def abstract_mesh(device: Device, num_devices: int) -> AbstractMesh:
    """Returns a mesh that suffices for lowering, with plain jax."""
    abstract = AbstractDevice(device.kind, device.num_cores, device.platform)
    return AbstractMesh((1, num_devices), AXES, axis_types=(AxisType.Auto,) * 2, abstract_device=abstract)


@contextlib.contextmanager
def targeting(device: Device, num_devices: int = 1) -> Iterator[AbstractMesh]:
    """Makes `pallas_kernels.target.current_target` see the device."""
    mesh = abstract_mesh(device, num_devices)
    with use_abstract_mesh(mesh):
        yield mesh


@contextlib.contextmanager
def using(mesh: Any) -> Iterator[None]:
    """Makes kernels see the devices of a mesh, real or abstract."""
    with use_abstract_mesh(mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh):
        yield
