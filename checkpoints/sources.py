"""What every weight file offers: names, specs and one tensor at a time."""

import difflib
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

CPU_ALIGNMENT = 64  # XLA on CPU takes a host buffer without copying only at this alignment (bytes)


class TensorSpec(NamedTuple):
    """Shape and stored type of a tensor.

    Attributes:
        shape: NumPy order, matrices are [out, in].
        dtype: the file's own name of the type: "F32", "BF16", "Q4_1", "F8_E4M3", ...
    """

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """A set of named tensors that are read lazily, one at a time, from any thread."""

    @property
    def path(self) -> Path:
        """The file or directory, for messages."""
        ...

    def names(self) -> Sequence[str]:
        """The names in file order."""
        ...

    def spec(self, name: str) -> TensorSpec:
        """The shape and stored type, without reading the tensor. ValueError on an unknown name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor: a read-only view of the memory map where no conversion is needed."""
        ...

    def close(self) -> None:
        """Forgets the file. Arrays already read stay valid."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class PackedSource(TensorSource, Protocol):
    """A source with block types, whose bytes can be had as they are."""

    def read_packed(self, name: str) -> tuple[np.ndarray, str]:
        """The stored bytes, uint8 [..., bytes a row], and the type's name."""
        ...

    def release(self, name: str) -> None:
        """Lets the system take back the memory of a tensor that has been copied; it may still be read."""
        ...


class Closing:
    """Gives a source its `with` statement."""

    def close(self) -> None:
        """Forgets the file."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_source(path: Path | str) -> TensorSource:
    """Opens a GGUF file, a safetensors file or a Hugging Face directory.

    Raises:
        ValueError: when the path holds none of these.
    """
    from checkpoints.gguf_io import GGUFFile
    from checkpoints.safetensors_io import SafetensorsSource

    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return GGUFFile(path)
    if path.is_dir() or path.suffix == ".safetensors":
        return SafetensorsSource(path)
    raise ValueError(
        f"{path}: wanted a .gguf file, a .safetensors file or a directory with model.safetensors, "
        f"got {'a file of another kind' if path.exists() else 'nothing at this path'}"
    )


def map_file(path: Path) -> mmap.mmap:
    """Maps a whole file read-only. The map lives until the last array on it is gone.

    Raises:
        ValueError: when it is not a file or is empty.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; check the path")
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty; download it again")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that XLA on CPU takes without copying."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + CPU_ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % CPU_ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def unknown_tensor(path: Path, name: str, names: Iterable[str]) -> ValueError:
    """The error for a name that a file does not have, with the nearest names that it has."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else "; names() lists what it has"
    return ValueError(f"{path}: no tensor {name!r}{hint}")
