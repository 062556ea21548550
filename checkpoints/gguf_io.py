"""Reads GGUF files: metadata, and tensors dequantized or packed."""

import mmap
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.gguf_header import GGUFHeader, TensorInfo, parse_header
from checkpoints.gguf_types import GGML_TYPES, GGMLType
from checkpoints.sources import Closing, TensorSpec, aligned_empty, map_file, unknown_tensor

# Elements a call of the library's dequantize: its temporaries then stay in the L2 cache. Row by row, as the
# library's own callers do it, costs four times as much.
CHUNK_ELEMENTS = 1 << 16
SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class GGUFFile(Closing):
    """A GGUF model, one file or all parts of a split one (`-00001-of-00003.gguf`), as a `TensorSource`.

    Only little-endian versions 2 and 3. Opening parses the headers; tensors are read when asked for.
    `metadata` holds plain Python values and lists, of the first part when split.

    Raises:
        ValueError: when the file is damaged, truncated, of another format, or a part is missing.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._maps: list[mmap.mmap] = []
        self._tensors: dict[str, tuple[int, TensorInfo]] = {}  # name -> part, place
        first = self._add_part(self._path)
        self.metadata: dict[str, Any] = first.metadata
        count = first.metadata.get("split.count", 1)
        if count != 1:
            self._open_parts(count)

    @property
    def path(self) -> Path:
        """The file that was opened."""
        return self._path

    def names(self) -> Sequence[str]:
        """Tensor names in file order."""
        return list(self._tensors)

    def spec(self, name: str) -> TensorSpec:
        """Shape in NumPy order ([out, in]) and GGML type name. ValueError on an unknown name."""
        info = self._find(name)[1]
        return TensorSpec(info.shape, info.type.name)

    def read(self, name: str) -> np.ndarray:
        """The tensor in NumPy order.

        Plain types (F32, F16, BF16, F64, integers) come as read-only views of the file in their own dtype,
        block types dequantized to float32 by the gguf library.

        Raises:
            ValueError: unknown name, or a type that the installed gguf library cannot dequantize.
        """
        info = self._find(name)[1]
        dtype = info.type.numpy_dtype
        if dtype is not None:
            return self._bytes(name).view(dtype).reshape(info.shape)
        return _dequantize(self._bytes(name), info, f"{self._path}: tensor {name!r}")

    def read_packed(self, name: str) -> tuple[np.ndarray, str]:
        """The stored bytes, uint8 [..., bytes a row], a view of the file, and the GGML type name."""
        info = self._find(name)[1]
        row_bytes = (info.shape[-1] if info.shape else 1) // info.type.block_size * info.type.block_bytes
        return self._bytes(name).reshape(*info.shape[:-1], row_bytes), info.type.name

    def release(self, name: str) -> None:
        """Lets the system take back the pages of a tensor that has been copied; reading it again reads the file."""
        part, info = self._find(name)
        first = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE  # its first page may hold the end of another tensor
        if hasattr(mmap, "MADV_DONTNEED") and first < info.start + info.nbytes:
            self._maps[part].madvise(mmap.MADV_DONTNEED, first, info.start + info.nbytes - first)

    def is_packed(self, name: str) -> bool:
        """Whether the tensor is of a block type."""
        return self._find(name)[1].type.numpy_dtype is None

    def close(self) -> None:
        """Forgets the file. Arrays already read stay valid."""
        self._maps.clear()

    def _find(self, name: str) -> tuple[int, TensorInfo]:
        if name not in self._tensors:
            raise unknown_tensor(self._path, name, self._tensors)
        return self._tensors[name]

    def _bytes(self, name: str) -> np.ndarray:
        part, info = self._find(name)
        if not self._maps:
            raise ValueError(f"{self._path}: the file is closed; read inside the with block")
        return np.frombuffer(self._maps[part], np.uint8, info.nbytes, info.start)

    def _add_part(self, path: Path) -> GGUFHeader:
        file = map_file(path)
        header = parse_header(file, path)
        for name, info in header.tensors.items():
            if name in self._tensors:
                raise ValueError(f"{path}: tensor {name!r} is in another part too; the parts do not belong together")
            self._tensors[name] = (len(self._maps), info)
        self._maps.append(file)
        return header

    def _open_parts(self, count: Any) -> None:
        """Opens all parts of a split file; the first one holds the metadata."""
        match = SPLIT_NAME.fullmatch(self._path.name)
        if match is None or int(match["count"]) != count:
            raise ValueError(
                f"{self._path}: part of a model split into {count!r} files; wanted the name "
                f"NAME-00001-of-{count:>05}.gguf with the other parts beside it; keep the parts' names, "
                f"or join them with llama-gguf-split --merge"
            )
        self._maps.clear()
        self._tensors.clear()
        for number in range(count):
            part = self._path.with_name(f"{match['stem']}-{number + 1:05}-of-{count:05}.gguf")
            if not part.is_file():
                raise ValueError(f"{part}: part {number + 1} of {count} of a split model is missing; download it too")
            header = self._add_part(part)
            if (got := header.metadata.get("split.no")) != number:
                raise ValueError(f"{part}: wanted split.no {number}, got {got!r}; the parts do not belong together")
            if number == 0:
                self.metadata = header.metadata
        wanted = self.metadata.get("split.tensors.count", len(self._tensors))
        if wanted != len(self._tensors):
            raise ValueError(f"{self._path}: wanted {wanted} tensors in all parts, got {len(self._tensors)}")


def _dequantize(packed: np.ndarray, info: TensorInfo, where: str) -> np.ndarray:
    """Dequantizes packed bytes [nbytes] to float32 `info.shape`, a cache-sized piece at a time."""
    import gguf.quants  # costs 0.1-0.5 s, and plain files never need it

    kind = _library_type(info.type, where)
    result = aligned_empty(info.shape, np.dtype(np.float32))
    flat = result.reshape(-1)
    chunk = CHUNK_ELEMENTS // info.type.block_size
    size, nbytes = chunk * info.type.block_size, chunk * info.type.block_bytes
    try:
        for index in range(-(-packed.size // nbytes)):
            piece = packed[index * nbytes : (index + 1) * nbytes]
            flat[index * size : (index + 1) * size] = gguf.quants.dequantize(piece[None], kind)[0]
    except NotImplementedError as error:
        raise _cannot_dequantize(info.type, where) from error
    return result


def _library_type(type: GGMLType, where: str) -> Any:
    import gguf

    if type.name not in gguf.GGMLQuantizationType.__members__:
        raise _cannot_dequantize(type, where)
    return gguf.GGMLQuantizationType[type.name]


def _cannot_dequantize(type: GGMLType, where: str) -> ValueError:
    import gguf
    import gguf.quants

    def can(other: GGMLType) -> bool:
        try:
            block = np.zeros((1, other.block_bytes), np.uint8)
            gguf.quants.dequantize(block, gguf.GGMLQuantizationType[other.name])
        except (KeyError, NotImplementedError):
            return False
        return True

    names = ", ".join(other.name for other in GGML_TYPES.values() if other.block_size > 1 and can(other))
    return ValueError(
        f"{where} has type {type.name}, which the installed gguf library cannot dequantize; "
        f"it can do {names}; try a newer gguf (pip install -U gguf) or a file of another quantization"
    )
