"""Reads safetensors: one file, or a Hugging Face directory of shards, memory mapped.

The header is read here and not by the safetensors library: its NumPy side copies and knows no f8.
Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.sources import Closing, TensorSpec, map_file, unknown_tensor

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"


class _Place(NamedTuple):
    file: Path
    spec: TensorSpec
    start: int
    nbytes: int


class SafetensorsSource(Closing):
    """A safetensors file or a Hugging Face directory, as a `TensorSource`.

    In a directory, `model.safetensors.index.json` wins over `model.safetensors`, as in transformers.
    Every `read` is a read-only view of the file.

    Raises:
        ValueError: when a file is missing, truncated or damaged, or index and shards disagree.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._maps: dict[Path, mmap.mmap] = {}
        self._places: dict[str, _Place] = {}
        index = self._path / INDEX_NAME
        if not self._path.is_dir():
            self._add(self._path)
        elif index.is_file():
            self._add_shards(index)
        elif (single := self._path / SINGLE_NAME).is_file():
            self._add(single)
        else:
            raise ValueError(
                f"{self._path}: wanted {SINGLE_NAME} or {INDEX_NAME} in this directory, got neither"
            )

    @property
    def path(self) -> Path:
        """The file or directory that was opened."""
        return self._path

    def names(self) -> Sequence[str]:
        """Tensor names in file order."""
        return list(self._places)

    def spec(self, name: str) -> TensorSpec:
        """Shape and safetensors type name ("BF16"). ValueError on an unknown name."""
        return self._find(name).spec

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file. ValueError on an unknown name."""
        place = self._find(name)
        if not self._maps:
            raise ValueError(f"{self._path}: the file is closed; read inside the with block")
        raw = np.frombuffer(self._maps[place.file], np.uint8, place.nbytes, place.start)
        return raw.view(DTYPES[place.spec.dtype]).reshape(place.spec.shape)

    def close(self) -> None:
        """Forgets the files. Arrays already read stay valid."""
        self._maps.clear()

    def _find(self, name: str) -> _Place:
        if name not in self._places:
            raise unknown_tensor(self._path, name, self._places)
        return self._places[name]

    def _add(self, file: Path) -> set[str]:
        self._maps[file] = map_file(file)
        places = _parse_header(self._maps[file], file)
        for name, place in places.items():
            if name in self._places:
                raise ValueError(
                    f"{file}: tensor {name!r} is in {self._places[name].file} too; remove one of them"
                )
            self._places[name] = place
        return set(places)

    def _add_shards(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            shards: dict[str, set[str]] = {}
            for name, file in weight_map.items():
                if not isinstance(file, str):
                    raise TypeError(f"{name}: {file!r}")
                shards.setdefault(file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f'{index}: wanted JSON with {{"weight_map": {{tensor: file}}}}, got {error!r}'
            ) from error
        escaping = [file for file in shards if Path(file).name != file]
        if escaping:
            raise ValueError(f"{index}: wanted plain file names beside the index, got {escaping}")
        missing = sorted(file for file in shards if not index.with_name(file).is_file())
        if missing:
            raise ValueError(
                f"{index}: {len(missing)} of {len(shards)} shards are missing: {missing}; download them too"
            )
        for file, names in shards.items():
            held = self._add(index.with_name(file))
            if lacking := sorted(names - held):
                raise ValueError(
                    f"{index.with_name(file)}: {INDEX_NAME} says it holds "
                    f"{lacking[:10]} ({len(lacking)} in all), it does not; "
                    f"index and shards are of different downloads"
                )
            if unlisted := sorted(held - names):
                raise ValueError(
                    f"{index.with_name(file)}: holds {unlisted[:10]} ({len(unlisted)} in all), "
                    f"which {INDEX_NAME} does not list for it; index and shards are of different downloads"
                )


def _parse_header(buffer: mmap.mmap, file: Path) -> dict[str, _Place]:
    if len(buffer) < 8:
        raise ValueError(
            f"{file}: wanted 8 bytes of header length, got a file of {len(buffer)}; download it again"
        )
    (length,) = struct.unpack_from("<Q", buffer)
    if length > MAX_HEADER_BYTES or 8 + length > len(buffer):
        raise ValueError(
            f"{file}: the header claims {length} bytes, the file has {len(buffer)}; "
            f"it is truncated or not safetensors"
        )
    try:
        entries = json.loads(buffer[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file}: the header is not JSON ({error}); the file is damaged or not safetensors"
        ) from error
    if not isinstance(entries, dict):
        raise ValueError(
            f"{file}: the header is a JSON {type(entries).__name__}, wanted an object; the file is damaged"
        )
    entries.pop("__metadata__", None)
    return {name: _place(name, entry, 8 + length, len(buffer), file) for name, entry in entries.items()}


def _place(name: str, entry: Any, data_start: int, size: int, file: Path) -> _Place:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: tensor {name!r}: wanted dtype, shape and data_offsets, got {entry!r}; "
            f"the file is damaged"
        ) from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{file}: tensor {name!r} has type {dtype!r}, supported are {', '.join(DTYPES)}")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"{file}: tensor {name!r}: wanted whole numbers, got {entry!r}; the file is damaged")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise ValueError(
            f"{file}: tensor {name!r} {list(shape)} {dtype} wants {nbytes} bytes, got {end - begin}; "
            f"the file is damaged"
        )
    if data_start + end > size:
        raise ValueError(
            f"{file}: tensor {name!r} ends at byte {data_start + end}, but the file has {size}; "
            f"the file is truncated, download it again"
        )
    return _Place(file, TensorSpec(shape, dtype), data_start + begin, nbytes)
