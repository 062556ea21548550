"""The quantized matmul on a TPU (Pallas Mosaic)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmul.tpu_tiles import TpuTiles, choose_tiles
from pallas_kernels.quantized_matmul.weights import PACK_BLOCK, QuantizedWeight
from pallas_kernels.target import require_tpu

_LANES = 128
_INPUTS = (((1,), (1,)), ((), ()))  # dot_general over the inputs of x[m, l] and w[n, l]


def quantized_matmul_mosaic_tpu(
    x: Float[Array, "M K"],
    weight: QuantizedWeight,
    *,
    x_scale: Float[Array, " M"] | None,
    out_dtype: jax.typing.DTypeLike,
    interpret: Any = False,
    tiles: TpuTiles | None = None,
) -> Float[Array, "M N"]:
    """Returns `x @ dequantize_weight(weight).T`; arguments as for `quantized_matmul_reference`."""
    require_tpu(interpret)
    M, K = x.shape
    N, L = weight.data.shape
    planes = 8 // weight.bits
    G = weight.scale.shape[1]
    lanes = L if G == 1 else max(weight.group // planes, PACK_BLOCK // 2 if planes == 2 else 1)
    if G > 1 and (lanes % _LANES and _LANES % lanes or (planes == 2 and weight.group not in (32,) and weight.group % PACK_BLOCK)):
        raise NotImplementedError(f"mosaic_tpu: groups of {weight.group} do not fit tiles of {_LANES} lanes")

    operand = x.dtype
    if x.dtype == jnp.int8 and (planes == 2 or lanes < _LANES):
        operand = jnp.dtype(jnp.bfloat16)
    if x.dtype == jnp.float8_e4m3fn:
        operand = jnp.dtype(jnp.bfloat16)
    if x.dtype == jnp.float16:
        operand = jnp.dtype(jnp.float32)
    unit = max(_LANES, lanes) if G > 1 else _LANES
    expansion = max(1, _LANES // lanes) if G > 1 else 1
    sublanes = 32 // operand.itemsize
    rows = -(-M // sublanes) * sublanes
    tiles = tiles or choose_tiles(rows, N, L, unit, expansion)
    rows = -(-M // tiles.block_m) * tiles.block_m
    stored_dtype = jnp.dtype(jnp.float32) if out_dtype == jnp.float16 else jnp.dtype(out_dtype)

    x = jnp.pad(x, ((0, rows - M), (0, 0)))
    halves = x.astype(operand).reshape(rows, -1, 1 if planes == 1 else planes, K if planes == 1 else PACK_BLOCK // 2)
    operands = [jnp.moveaxis(halves, 2, 0).reshape(planes, rows, L), weight.data]
    bm, bn, bl = tiles.block_m, tiles.block_n, tiles.block_l
    per_output = pl.BlockSpec((1, bn), _at_n_row) if G == 1 else pl.BlockSpec((bn, G), _at_n)
    specs = [pl.BlockSpec((planes, bm, bl), _at_x), pl.BlockSpec((bn, bl), _at_w), per_output]
    operands.append(weight.scale.reshape(1, N) if G == 1 else weight.scale)
    if weight.zero is not None:
        operands.append(weight.zero.reshape(1, N) if G == 1 else weight.zero)
        operands.append(jnp.sum(x.astype(jnp.float32).reshape(rows, G, weight.group), axis=-1))
        specs += [per_output, pl.BlockSpec((bm, G), _at_m)]
    if x_scale is not None:
        operands.append(jnp.pad(x_scale, (0, rows - M)).reshape(rows, 1))
        specs.append(pl.BlockSpec((bm, 1), _at_m))
    kernel = functools.partial(
        _kernel, lanes=lanes, unit=unit, own_plane_groups=planes == 2 and weight.group < PACK_BLOCK and G > 1,
        has_zero=weight.zero is not None, has_x_scale=x_scale is not None,
    )  # fmt: skip
    scratch = [pltpu.VMEM((bm, bn), jnp.float32)]
    if G > 1:
        scratch.append(pltpu.VMEM((G, bn), jnp.float32))
    out = pl.pallas_call(
        kernel,
        grid=(rows // bm, pl.cdiv(N, bn), L // bl),
        in_specs=specs,
        out_specs=pl.BlockSpec((bm, bn), _at_out),
        out_shape=jax.ShapeDtypeStruct((rows, N), stored_dtype),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="quantized_matmul",
    )(*operands)
    return out[:M].astype(out_dtype)


def _at_x(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return 0, m, k


def _at_w(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return n, k


def _at_n(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return n, 0


def _at_n_row(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return 0, n


def _at_m(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return m, 0


def _at_out(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return m, n


def _kernel(
    x_ref,  # [planes, block_m, block_l]
    w_ref,  # [block_n, block_l]
    scale_ref,  # [block_n, G] or, for one group, [1, block_n]
    *refs,
    lanes: int,
    unit: int,
    own_plane_groups: bool,
    has_zero: bool,
    has_x_scale: bool,
):
    refs = list(refs)
    zero_ref, sums_ref = (refs.pop(0), refs.pop(0)) if has_zero else (None, None)
    x_scale_ref = refs.pop(0) if has_x_scale else None
    out_ref, acc_ref, *rest = refs
    scales_ref = rest[0] if rest else None  # [G, block_n]
    planes, block_m, block_l = x_ref.shape
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _start():
        if scales_ref is not None:
            scales_ref[...] = scale_ref[...].T
        if zero_ref is None:
            acc_ref[...] = jnp.zeros_like(acc_ref)
        elif scales_ref is None:
            acc_ref[...] = -sums_ref[...] * zero_ref[...]
        else:
            acc_ref[...] = -_dot(sums_ref[...], scale_ref[...] * zero_ref[...])

    for start in range(0, block_l, unit):
        width = min(unit, block_l - start)
        codes = w_ref[:, start : start + width]
        parts = [
            _dot(_expand(x_ref[p, :, start : start + width], lanes), _convert(codes, p, planes, x_ref.dtype))
            for p in range(planes)
        ]
        if scales_ref is None:
            for part in parts:
                acc_ref[...] += part
            continue
        if not own_plane_groups:
            parts = [functools.reduce(jnp.add, parts)]
        first = k * (block_l // lanes) + start // lanes
        for j in range(parts[0].shape[0] // block_m):
            for p, part in enumerate(parts):
                group = (first + j) * len(parts) + p
                acc_ref[...] += part[j * block_m : (j + 1) * block_m] * scales_ref[pl.ds(group, 1), :]

    @pl.when(k == pl.num_programs(2) - 1)
    def _finish():
        out = acc_ref[...]
        if scales_ref is None:
            out = out * scale_ref[...]
        if x_scale_ref is not None:
            out = out * x_scale_ref[...]
        out_ref[...] = out.astype(out_ref.dtype)


def _expand(x: jax.Array, lanes: int) -> jax.Array:
    """Returns x[m, l] once for each group of `lanes` columns, with zeros outside the group: [groups * m, l]."""
    count = x.shape[1] // lanes
    if count <= 1:
        return x
    owner = lax.broadcasted_iota(jnp.int32, x.shape, 1) // lanes
    return jnp.concatenate([jnp.where(owner == j, x, jnp.zeros_like(x)) for j in range(count)])


def _convert(codes: jax.Array, plane: int, planes: int, dtype: Any) -> jax.Array:
    if planes == 2:
        codes = codes.astype(jnp.int32)
        codes = codes & 15 if plane == 0 else codes >> 4
        return codes.astype(jnp.float32).astype(dtype)
    if codes.dtype == dtype:
        return codes
    return codes.astype(jnp.float32).astype(dtype)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    accumulator = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    product = lax.dot_general(x, w, _INPUTS, precision=precision, preferred_element_type=accumulator)
    return product.astype(jnp.float32)
