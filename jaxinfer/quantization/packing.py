"""Which weights are packed when a model is loaded, and how."""

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from checkpoints.gguf_io import GGUFFile
from checkpoints.load import Target
from checkpoints.sources import TensorSource
from jaxinfer.quantization.layouts import KEPT_TYPES, Layout, current_layout, pack_gguf, pack_matrix, packing_pays

log = logging.getLogger(__name__)

QUANTIZE = ("none", "int8", "int4")
_ROUNDED = {"int8": {"bits": 8, "group": None}, "int4": {"bits": 4, "group": 32}}


def packed_plan(
    plan: Mapping[str, Target], source: TensorSource, abstract: Mapping[str, jax.ShapeDtypeStruct],
    quantize: str | None, layout: Layout | None = None,
) -> dict[str, Target]:  # fmt: skip
    """Returns the loading plan with every matrix packed that is to be.

    Args:
        plan: source tensor to leaf, one each.
        source: the open file.
        abstract: the leaves by path.
        quantize: "int8" (one scale an output) or "int4" (a scale and an offset for 32 inputs) rounds every matrix; None
            keeps GGUF's packed types as they are, and rounds those that have no kernel to 8 bits in groups of 32; on a
            CPU without C++ kernels it keeps nothing packed.
        layout: of another device than the default one, for which packing pays.
    """
    if quantize is None and layout is None and not packing_pays():
        if isinstance(source, GGUFFile) and any(source.is_packed(name) for name in source.names()):
            log.warning("packed weights are expanded: without C++ kernels they would be slower (quantize keeps them)")
        return dict(plan)
    layout, names = layout or current_layout(), set(source.names())
    result, converted, left = dict(plan), Counter[str](), Counter[str]()
    for name, target in plan.items():
        if name not in names:
            continue  # load_tree says so
        leaf, stored = abstract[target.path], source.spec(name).dtype
        if leaf.ndim != 2 or not (quantize or (isinstance(source, GGUFFile) and source.is_packed(name))):
            continue
        if leaf.shape[1] % layout.inputs:
            left[stored] += 1
        elif quantize is None and stored in KEPT_TYPES:
            pack = functools.partial(pack_gguf, stored=stored, layout=layout)
            result[name] = dataclasses.replace(target, pack=pack, raw=True)
        else:
            how = _ROUNDED[quantize] if quantize else {"bits": 8, "group": 32}
            result[name] = dataclasses.replace(target, pack=functools.partial(pack_matrix, layout=layout, **how))
            if quantize is None:
                converted[stored] += 1
    if converted:
        log.warning("no kernel reads the types of %s: kept in 8 bits, in groups of 32", _counts(converted))
    if left:
        log.warning("not packed, as the inputs are no multiple of %d: %s", layout.inputs, _counts(left))
    return result


def pack_params(params: dict[str, Any], quantize: str) -> dict[str, Any]:
    """Returns a parameter tree with its matrices rounded to "int8" or "int4", each freed as it is done."""
    layout: Layout = current_layout()

    def pack(leaf: Any) -> Any:
        if leaf.ndim != 2 or leaf.shape[1] % layout.inputs:
            return leaf
        packed = pack_matrix(np.asarray(leaf), layout=layout, **_ROUNDED[quantize])
        leaf.delete()
        return jax.tree.map(jax.device_put, packed)

    return jax.tree.map(pack, params)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name} tensors" for name, count in found.items())
