"""Parses the header of a GGUF file; every length is checked before it is believed.

The gguf library's own reader makes a NumPy view per string, seconds for a real vocabulary. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from checkpoints.gguf_types import GGML_TYPES, GGMLType

MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NESTING = 4  # of arrays in arrays; no known file nests at all, and a damaged one must not recurse forever
DEFAULT_ALIGNMENT = 32
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "B", 10: "<Q", 11: "<q", 12: "<d"}
SCALAR_DTYPES = {kind: np.dtype(code) for kind, code in SCALARS.items()}


class TensorInfo(NamedTuple):
    """Where a tensor lies: `nbytes` from byte `start` of the file; `shape` is in NumPy order."""

    shape: tuple[int, ...]
    type: GGMLType
    start: int
    nbytes: int


class GGUFHeader(NamedTuple):
    """Everything before the tensor data."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads forward through a buffer and never past its end."""

    def __init__(self, buffer: mmap.mmap | bytes, path: Path) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.path = path
        self.position = 0

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message} (at byte {self.position} of {self.size})")

    def need(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.position:
            raise self.error(
                f"{what} wants {nbytes} bytes, got {self.size - self.position} to the end of the file; "
                f"the file is truncated or damaged, download it again"
            )

    def scalar(self, code: str, what: str) -> Any:
        self.need(nbytes := struct.calcsize(code), what)
        (value,) = struct.unpack_from(code, self.buffer, self.position)
        self.position += nbytes
        return value

    def text(self, what: str) -> str:
        return self.texts(1, what)[0]

    def texts(self, count: int, what: str) -> list[str]:
        self.need(8 * count, what)
        # Local names: this loop runs 100,000 times for a real vocabulary.
        buffer, position, size, read_length = (
            self.buffer,
            self.position,
            self.size,
            struct.Struct("<Q").unpack_from,
        )
        result = []
        try:
            for _ in range(count):
                start = position + 8
                position = start + read_length(buffer, position)[0]
                if position > size:
                    raise self.error(f"a string in {what} ends beyond the file; the file is truncated or damaged")
                result.append(str(buffer[start:position], "utf-8"))
        except struct.error as error:
            raise self.error(f"{what} ends beyond the file; the file is truncated or damaged") from error
        except UnicodeDecodeError as error:
            raise self.error(f"a string in {what} is not UTF-8; the file is damaged") from error
        self.position = position
        return result

    def value(self, kind: int, what: str) -> Any:
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY:
            return self.array(what, nesting=1)
        if kind not in SCALARS:
            raise self.error(f"{what} has value type {kind}, wanted one of 0..12; the file is damaged or too new")
        value = self.scalar(SCALARS[kind], what)
        return bool(value) if kind == BOOL else value

    def array(self, what: str, nesting: int) -> list[Any]:
        kind, count = self.scalar("<I", what), self.scalar("<Q", what)
        if kind == STRING:
            return self.texts(count, what)
        if kind == ARRAY:
            if nesting >= MAX_NESTING:
                raise self.error(f"{what} nests arrays more than {MAX_NESTING} deep; the file is damaged")
            self.need(12 * count, what)  # type and length of each inner array
            return [self.array(what, nesting + 1) for _ in range(count)]
        if kind not in SCALARS:
            raise self.error(f"{what} is an array of type {kind}, wanted one of 0..12; the file is damaged or too new")
        dtype = SCALAR_DTYPES[kind]
        self.need(nbytes := dtype.itemsize * count, what)
        values = np.frombuffer(self.buffer, dtype, count, self.position)
        self.position += nbytes
        return (values != 0).tolist() if kind == BOOL else values.tolist()


def parse_header(buffer: mmap.mmap | bytes, path: Path) -> GGUFHeader:
    """Parses and checks the header of the GGUF file that `buffer` holds whole.

    Args:
        buffer: the file's bytes; only the header is touched.
        path: named in errors.

    Returns:
        The header; each tensor's bytes are known to lie inside the file.

    Raises:
        ValueError: wrong magic, version or byte order; damaged or truncated; a tensor type nobody knows.
    """
    cursor = _Cursor(buffer, path)
    magic = bytes(buffer[:4])
    if magic != b"GGUF":
        raise ValueError(f"{path}: wanted a GGUF file (it begins with b'GGUF'), got {magic!r}; is it another format?")
    cursor.position = 4
    version = cursor.scalar("<I", "the version")
    if version and version & 0xFFFF == 0:
        raise ValueError(f"{path}: a big-endian GGUF; wanted little-endian, convert it with gguf-convert-endian")
    if version not in (2, 3):
        raise ValueError(f"{path}: GGUF version {version}, wanted 2 or 3; convert the model again")
    num_tensors, num_values = (
        cursor.scalar("<Q", "the tensor count"),
        cursor.scalar("<Q", "the metadata count"),
    )
    cursor.need(13 * num_values, f"{num_values} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text("a metadata key")
        value = cursor.value(cursor.scalar("<I", f"metadata {key!r}"), f"metadata {key!r}")
        if key in metadata:
            raise cursor.error(f"metadata {key!r} twice; the file is damaged")
        metadata[key] = value
    cursor.need(24 * num_tensors, f"{num_tensors} tensor entries")
    entries: dict[str, tuple[tuple[int, ...], GGMLType, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text("a tensor name")
        if name in entries:
            raise cursor.error(f"tensor {name!r} twice; the file is damaged")
        entries[name] = _read_entry(cursor, name)
    return GGUFHeader(version, metadata, _locate(cursor, entries, _alignment(metadata, path)))


def _read_entry(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], GGMLType, int]:
    num_dims = cursor.scalar("<I", f"tensor {name!r}")
    if num_dims > MAX_DIMS:
        raise cursor.error(f"tensor {name!r} has {num_dims} dimensions, at most {MAX_DIMS} exist; the file is damaged")
    dims = [cursor.scalar("<Q", f"tensor {name!r}") for _ in range(num_dims)]
    type_id = cursor.scalar("<I", f"tensor {name!r}")
    offset = cursor.scalar("<Q", f"tensor {name!r}")
    if type_id not in GGML_TYPES:
        known = ", ".join(f"{type.name}={number}" for number, type in GGML_TYPES.items())
        raise cursor.error(f"tensor {name!r} has unknown type {type_id}; known: {known}")
    type = GGML_TYPES[type_id]
    if dims and dims[0] % type.block_size:
        raise cursor.error(
            f"tensor {name!r}: rows of {dims[0]} are not whole blocks of {type.name} ({type.block_size})"
        )
    return tuple(reversed(dims)), type, offset


def _alignment(metadata: dict[str, Any], path: Path) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment is {alignment!r}, wanted a power of two; the file is damaged")
    return alignment


def _locate(
    cursor: _Cursor, entries: dict[str, tuple[tuple[int, ...], GGMLType, int]], alignment: int
) -> dict[str, TensorInfo]:
    """Turns offsets into file positions and checks that every tensor ends inside the file."""
    data_start = cursor.position + -cursor.position % alignment
    tensors = {}
    for name, (shape, type, offset) in entries.items():
        if offset % alignment:
            raise cursor.error(f"tensor {name!r} lies at offset {offset}, not a multiple of the alignment {alignment}")
        elements = 1
        for dim in shape:  # Python integers: damaged dimensions must not overflow into a small product
            elements *= dim
        nbytes = elements // type.block_size * type.block_bytes
        start = data_start + offset
        if start + nbytes > cursor.size:
            raise ValueError(
                f"{cursor.path}: tensor {name!r} {list(shape)} {type.name} ends at byte {start + nbytes}, "
                f"but the file has {cursor.size}; the file is truncated, download it again"
            )
        tensors[name] = TensorInfo(shape, type, start, nbytes)
    return tensors
