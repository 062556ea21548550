"""The bytes of weights in memory, without reading them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from checkpoints.gguf_io import GGUFFile
from checkpoints.gguf_types import GGML_TYPES
from checkpoints.load import Target
from checkpoints.trees import flatten
from jaxinfer.config import ModelConfig
from jaxinfer.model.params import abstract_params
from jaxinfer.model.weight_names import gguf_name, parameter_paths
from jaxinfer.quantization.layouts import Layout
from jaxinfer.quantization.packing import packed_plan

ROWS = 8  # of the sample that is packed: both layouts keep rows in multiples of 8


def weight_bytes(
    config: ModelConfig, dtype: Any, quantize: str | None, layout: Layout, gguf: GGUFFile | None = None
) -> int:
    """Returns the bytes of a model's weights as `load` places them.

    A few rows of each kind of matrix are packed by what packs the model; the rest is multiplication.

    Args:
        config: shape of the model.
        dtype: of what is not packed.
        quantize: see `load`.
        layout: of the device.
        gguf: the open file, whose packed types None keeps; other files have none.
    """
    abstract, _ = abstract_params(config, dtype)
    leaves = flatten(abstract)
    plan: Mapping[str, Target] = {}
    source: Any = gguf or _Unpacked(leaves)
    if quantize != "none" and (quantize or gguf):
        names = {gguf_name(path) if gguf else path: path for path in parameter_paths(abstract)}
        plan = packed_plan(
            {name: Target(path) for name, path in names.items()}, source, leaves, quantize, layout=layout
        )
    total, packed, seen = 0, set(), dict[tuple[Any, ...], int]()
    for name, target in plan.items():
        if target.pack is None:
            continue
        packed.add(target.path)
        rows, inputs = leaves[target.path].shape
        stored = source.spec(name).dtype if target.raw else ""
        if (stored, inputs) not in seen:
            seen[stored, inputs] = _packed_rows(target, inputs, stored)
        total += -(-rows // ROWS) * seen[stored, inputs]
    return total + sum(leaf.size * leaf.dtype.itemsize for path, leaf in leaves.items() if path not in packed)


class _Unpacked:
    """Stands for a source that has every leaf under its own path."""

    def __init__(self, leaves: Mapping[str, jax.ShapeDtypeStruct]):
        self._leaves = leaves

    def names(self) -> list[str]:
        return list(self._leaves)

    def spec(self, name: str) -> Any:
        return self._leaves[name]


def _packed_rows(target: Target, inputs: int, stored: str) -> int:
    """Returns the bytes of `ROWS` rows."""
    assert target.pack is not None
    sample = np.zeros((ROWS, inputs), np.float32)
    if target.raw:
        [kind] = [kind for kind in GGML_TYPES.values() if kind.name == stored]
        sample = np.zeros((ROWS, inputs // kind.block_size * kind.block_bytes), np.uint8)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(target.pack(sample)))
