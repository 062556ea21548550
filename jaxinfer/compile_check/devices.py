"""The devices that can be compiled for, as numbers. Imports no jax.

GPU: NVIDIA's data sheets (dense rates; H100 and H200 SXM, A100 SXM 80 GB) and what the driver reports for memory.
TPU: Google Cloud's system architecture pages.
"""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: what the user calls it.
        platform: "gpu" or "tpu".
        kind: what jax calls it (`device_kind`).
        num_cores: streaming multiprocessors, or tensor cores.
        memory_bytes: of the device.
        usable_share: part of the memory that jax lets a program have (it preallocates three quarters of a GPU).
        bandwidth: of that memory, bytes a second.
        peak: arithmetic in operations a second, by type ("bf16", "fp8", "int8"), without sparsity.
        compute_capability: of an NVIDIA GPU.
        shared_memory_per_core: bytes, GPU.
        shared_memory_per_block: the most that one block can have, bytes, GPU.
        l2_bytes: GPU.
        clock_ghz: GPU.
        fpus_per_core: GPU.
        topologies: smallest slice that holds so many devices, TPU.
    """

    name: str
    platform: str
    kind: str
    num_cores: int
    memory_bytes: int
    usable_share: float
    bandwidth: float
    peak: Mapping[str, float]
    compute_capability: tuple[int, int] = (0, 0)
    shared_memory_per_core: int = 0
    shared_memory_per_block: int = 0
    l2_bytes: int = 0
    clock_ghz: float = 0.0
    fpus_per_core: int = 128
    topologies: tuple[tuple[int, str], ...] = ()

    @property
    def lowering_platform(self) -> str:
        """What jax calls the platform when it lowers: "cuda" or "tpu"."""
        return "cuda" if self.platform == "gpu" else self.platform

    def topology(self, num_devices: int) -> str:
        """Returns the topology string of the smallest slice with so many devices.

        Raises:
            ValueError: no slice is so large.
        """
        if self.platform == "gpu":
            if num_devices > MAX_GPUS:
                raise ValueError(f"a mesh of {num_devices} {self.name} is more than the {MAX_GPUS} GPUs of one machine")
            return f"1x1x{num_devices}"
        for size, topology in self.topologies:
            if size >= num_devices:
                return f"{self.name}:{topology}"
        raise ValueError(f"a mesh of {num_devices} {self.name} is more than the {self.topologies[-1][0]} known here")

    def gpu_target_config(self) -> str:
        """Returns XLA's description of the GPU, in protocol buffer text."""
        major, minor = self.compute_capability
        extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return (
            f"gpu_device_info {{ threads_per_block_limit:1024 threads_per_warp:32 shared_memory_per_block:49152 "
            f"shared_memory_per_core:{self.shared_memory_per_core} threads_per_core_limit:2048 "
            f"core_count:{self.num_cores} fpus_per_core:{self.fpus_per_core} block_dim_limit_x:2147483647 "
            f"block_dim_limit_y:65535 block_dim_limit_z:65535 memory_bandwidth:{int(self.bandwidth)} "
            f"l2_cache_size:{self.l2_bytes} clock_rate_ghz:{self.clock_ghz} device_memory_size:{self.memory_bytes} "
            f"shared_memory_per_block_optin:{self.shared_memory_per_block} "
            f"cuda_compute_capability {{ major:{major} minor:{minor} feature_extension:{extension} }} "
            f"registers_per_core_limit:65536 registers_per_block_limit:65536 thread_dim_limit_x:1024 "
            f'thread_dim_limit_y:1024 thread_dim_limit_z:64 name:"{self.kind}" driver_version:"13.0.0" '
            f'runtime_version:"13.0.0" compile_time_toolkit_version:"13.0.0" dnn_version:"9.10.0" }} '
            f'platform_name:"CUDA" dnn_version_info {{ major:9 minor:10 }} device_description_str:"{self.kind}"'
        )


MAX_GPUS = 8
_GPU_SHARE = 0.75  # XLA_PYTHON_CLIENT_MEM_FRACTION
_TPU_SHARE = 0.97  # the run-time system keeps some

_HOPPER = {
    "num_cores": 132, "usable_share": _GPU_SHARE, "peak": {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12},
    "compute_capability": (9, 0), "shared_memory_per_core": 233472, "shared_memory_per_block": 232448,
    "l2_bytes": 52428800, "clock_ghz": 1.98,
}  # fmt: skip
_FLAT = ((1, "1x1"), (4, "2x2"), (8, "2x4"), (16, "4x4"))

DEVICES = {
    device.name: device
    for device in (
        Device("h200", "gpu", "NVIDIA H200", memory_bytes=151397597184, bandwidth=4.8e12, **_HOPPER),
        Device("h100", "gpu", "NVIDIA H100 80GB HBM3", memory_bytes=84942979072, bandwidth=3.35232e12, **_HOPPER),
        Device(
            "b200", "gpu", "NVIDIA B200", num_cores=148, memory_bytes=191514411008, usable_share=_GPU_SHARE,
            bandwidth=7.67232e12, peak={"bf16": 2.25e15, "fp8": 4.5e15, "int8": 4.5e15}, compute_capability=(10, 0),
            shared_memory_per_core=233472, shared_memory_per_block=232448, l2_bytes=132644864, clock_ghz=1.965,
        ),
        Device(
            "a100", "gpu", "NVIDIA A100-SXM4-80GB", num_cores=108, memory_bytes=85100068864, usable_share=_GPU_SHARE,
            bandwidth=2.03904e12, peak={"bf16": 312e12, "int8": 624e12}, compute_capability=(8, 0),
            shared_memory_per_core=167936, shared_memory_per_block=166912, l2_bytes=41943040, clock_ghz=1.41,
            fpus_per_core=64,
        ),
        Device(
            "v5e", "tpu", "TPU v5 lite", num_cores=1, memory_bytes=16 * 2**30, usable_share=_TPU_SHARE, bandwidth=819e9,
            peak={"bf16": 197e12, "int8": 394e12}, topologies=_FLAT,
        ),
        Device(
            "v6e", "tpu", "TPU v6 lite", num_cores=1, memory_bytes=32 * 2**30, usable_share=_TPU_SHARE,
            bandwidth=1640e9, peak={"bf16": 918e12, "int8": 1836e12}, topologies=_FLAT,
        ),
        Device(
            "v5p", "tpu", "TPU v5p", num_cores=2, memory_bytes=95 * 2**30, usable_share=_TPU_SHARE, bandwidth=2765e9,
            peak={"bf16": 459e12, "int8": 918e12}, topologies=((4, "2x2x1"), (8, "2x2x2"), (16, "2x2x4")),
        ),
    )
}  # fmt: skip


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes of the mesh axes in a text such as "model=8" or "data=2,model=4".

    Raises:
        ValueError: the text is not of that form.
    """
    sizes = {"data": 1, "model": 1}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name.strip() not in sizes or not size.strip().isdigit() or int(size) < 1:
            raise ValueError(f"a mesh is written like model=8 or data=2,model=4, got {text!r}")
        sizes[name.strip()] = int(size)
    return sizes


def mesh_size(sizes: Mapping[str, int]) -> int:
    """Returns the number of devices of a mesh."""
    return math.prod(sizes.values())
