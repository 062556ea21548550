"""Reads safetensors: one file, or a Hugging Face directory of shards, lazily."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints.sources import Closing, TensorSpec, unknown_tensor

SINGLE_NAME, INDEX_NAME = "model.safetensors", "model.safetensors.index.json"


class SafetensorsSource(Closing):
    """A safetensors file or a Hugging Face directory, as a `TensorSource`.

    In a directory, `model.safetensors.index.json` wins over `model.safetensors`, as in transformers.

    Raises:
        ValueError: when a file is missing, truncated or damaged, or index and shards disagree.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._files: dict[str, Any] = {}  # tensor name: open file
        index = self._path / INDEX_NAME
        if not self._path.is_dir():
            self._add(self._path)
        elif index.is_file():
            self._add_shards(index)
        elif (single := self._path / SINGLE_NAME).is_file():
            self._add(single)
        else:
            raise ValueError(f"{self._path}: wanted {SINGLE_NAME} or {INDEX_NAME} in this directory, got neither")
        self._names = tuple(self._files)

    @property
    def path(self) -> Path:
        """The file or directory that was opened."""
        return self._path

    def names(self) -> Sequence[str]:
        """Tensor names in file order."""
        return self._names

    def spec(self, name: str) -> TensorSpec:
        """Shape and safetensors type name ("BF16"). ValueError on an unknown name."""
        tensor = self._file(name).get_slice(name)
        return TensorSpec(tuple(tensor.get_shape()), tensor.get_dtype())

    def read(self, name: str) -> np.ndarray:
        """The tensor. ValueError on an unknown name, or a type that NumPy has not (8-bit floats)."""
        file = self._file(name)
        try:
            return file.get_tensor(name)
        except (SafetensorError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{self._path}: tensor {name!r} of type {self.spec(name).dtype} cannot be a NumPy array: {error}"
            ) from error

    def close(self) -> None:
        """Forgets the files. Arrays already read stay valid."""
        self._files.clear()

    def _file(self, name: str) -> Any:
        if name not in self._names:
            raise unknown_tensor(self._path, name, self._names)
        if not self._files:
            raise ValueError(f"{self._path}: the file is closed; read inside the with block")
        return self._files[name]

    def _add(self, path: Path) -> set[str]:
        if not path.is_file():
            raise ValueError(f"{path}: no such file; check the path")
        try:
            file = safe_open(path, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: truncated, damaged or not safetensors ({error}); download it again") from error
        names = list(file.keys())
        if twice := [name for name in names if name in self._files]:
            raise ValueError(f"{path}: tensors {twice[:10]} are in another shard too; remove one of them")
        self._files |= dict.fromkeys(names, file)
        return set(names)

    def _add_shards(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
            shards: dict[str, set[str]] = {}
            for name, file in weight_map.items():
                if not isinstance(file, str):
                    raise TypeError(f"{name}: {file!r}")
                shards.setdefault(file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f'{index}: wanted JSON with {{"weight_map": {{tensor: file}}}}, got {error!r}') from error
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
