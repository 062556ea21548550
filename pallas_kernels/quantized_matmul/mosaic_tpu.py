"""The quantized matmul on a TPU (Pallas Mosaic)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmul.tpu_tiles import TpuTiles, choose_tiles, group_lanes
from pallas_kernels.quantized_matmul.weights import PACK_BLOCK, QuantizedWeight
from pallas_kernels.target import require_tpu

_INPUTS = (((1,), (1,)), ((), ()))  # dot_general over the inputs of x[m, l] and w[n, l]
_ROWS = (((1,), (0,)), ((), ()))
_LANES = 128
_VMEM_BYTES = 32 * 2**20  # of 128 MiB (v5e, v6e): the largest tiles, with f32 x, pass the default of 16


def quantized_matmul_mosaic_tpu(
    x: Float[Array, "M K"],
    weight: QuantizedWeight,
    *,
    x_scale: Float[Array, " M"] | None,
    out_dtype: jax.typing.DTypeLike,
    interpret: Any = False,
    tiles: TpuTiles | None = None,
) -> Float[Array, "M N"]:
    """Returns `x @ dequantize_weight(weight).T`; arguments as for `quantized_matmul_reference`.

    A blocked product over a grid of (rows, outputs, inputs), inputs innermost, summed in f32 in VMEM; the pipeline of
    Pallas copies the stored weight, 1 or 1/2 byte an input, two blocks deep. What is particular:

    - 4 bits: the codes are never interleaved. `x` is split into the two planes of `packing` outside (it is small) and
      each nibble of a block of bytes, unpacked in registers by a mask or a shift, meets its own plane.
    - Grouped scales multiply products, not weights. Groups of 128 stored columns or more have a dot of their own.
      Smaller ones share it: x is stacked once for each of `expansion` groups in 128 columns, zero outside the group,
      so that the MXU loads each weight once, at full depth; then each part is multiplied by its row of scales,
      which lies as [groups, outputs], or is transposed to it once a block of outputs.
    - Zero points: sum((c - z) s x) = sum(c s x) - sum(z s sum(x)): the accumulator starts with the second term.
    - int8 x and int8 weights with groups of 128 or more take the int8 MXU path; codes in 4 bits or smaller groups and
      float8 are converted to bf16 and f16 to f32, all exactly.

    FLOPs 2 M N K, times `expansion` on the MXU (1 for 8 bits with groups of 128 or one scale, 2 for 4 bits in groups of
    128, 4 in smaller). Bytes: the weight once for each block of 512 / `expansion` rows, x once for each block of
    outputs, the result once. VMEM at K = 4096 and 16 rows, 4 bits: twice 1 MiB weight, 2 x 128 KiB x, 64 KiB scales,
    32 KiB accumulator, and the unpacked 512 x 128 columns at a time. Expected on v5e (819 GB/s, 197 TFLOP/s bf16, about
    4 x 10^12 vector operations/s): 8 bits at M <= 64 bound by copies; 4 bits by unpacking, some 4 vector operations a
    weight, hence 60-70 % of the bandwidth; many rows near the MXU's rate over `expansion`. Not measured on hardware.

    Which form is preferred on a TPU, from full compiles: see `tpu_tiles.prefer_xla`.

    Args:
        x: bf16, f16 or f32 with `x_scale` None, else int8 or float8_e4m3fn codes.
        weight: the matrix f[N, K].
        x_scale: row m of x stands for `x[m] * x_scale[m]`.
        out_dtype: of the result.
        interpret: as in `pl.pallas_call`.
        tiles: None for `choose_tiles`.

    Raises:
        NotImplementedError: not a TPU, or groups that do not fit 128 columns.
        ValueError: `tiles` do not fit the arguments.
    """
    require_tpu(interpret)
    M, K = x.shape
    N, L = weight.data.shape
    planes, G = 8 // weight.bits, weight.scale.shape[1]
    lanes, unit, expansion = group_lanes(weight)
    operand = _operand_type(x.dtype, weight, expansion)
    sublanes = 32 // operand.itemsize
    tiles = tiles or choose_tiles(-(-M // sublanes) * sublanes, N, L, unit, expansion)
    bm, bn, bl = tiles.block_m, tiles.block_n, tiles.block_l
    if bm % sublanes or L % bl or (bl < L and bl % unit):
        raise ValueError(f"{tiles} must have block_m of whole {sublanes} rows and block_l of whole {unit}s in {L}")
    rows = -(-M // bm) * bm
    x = jnp.pad(x, ((0, rows - M), (0, 0)))
    in_planes = x.astype(operand).reshape(rows, -1, planes, K if planes == 1 else PACK_BLOCK // planes)

    across = G % _LANES > 0  # XLA:TPU then stores f32[N, G] by columns: the transpose is free, and rows cost a copy
    per_output = pl.BlockSpec((G, bn), _at_n_across) if across else pl.BlockSpec((bn, G), _at_n)
    operands = [
        jnp.moveaxis(in_planes, 2, 0).reshape(planes, rows, L),
        weight.data,
        weight.scale.T if across else weight.scale,
    ]
    specs = [pl.BlockSpec((planes, bm, bl), _at_x), pl.BlockSpec((bn, bl), _at_w), per_output]
    if weight.zero is not None:
        operands += [
            weight.zero.T if across else weight.zero,
            jnp.sum(x.astype(jnp.float32).reshape(rows, G, -1), axis=-1),
        ]
        specs += [per_output, pl.BlockSpec((bm, G), _at_m)]
    if x_scale is not None:
        operands.append(jnp.pad(x_scale, (0, rows - M)).reshape(rows, 1))
        specs.append(pl.BlockSpec((bm, 1), _at_m))
    stored_dtype = jnp.dtype(jnp.float32 if out_dtype == jnp.float16 else out_dtype)
    kernel = functools.partial(
        _kernel,
        one_group=G == 1,
        across=across,
        lanes=lanes,
        unit=unit,
        planes_have_groups=G > 1 and planes > 1 and weight.group < PACK_BLOCK,
        has_zero=weight.zero is not None,
        has_x_scale=x_scale is not None,
    )
    num_bytes = sum(each.size * each.dtype.itemsize for each in operands) + rows * N * stored_dtype.itemsize
    num_bytes += (pl.cdiv(N, bn) - 1) * rows * K * operand.itemsize * (bl < L)
    num_bytes += (rows // bm - 1) * weight.data.size * weight.data.dtype.itemsize
    out = pl.pallas_call(
        kernel,
        grid=(rows // bm, pl.cdiv(N, bn), L // bl),
        in_specs=specs,
        out_specs=pl.BlockSpec((bm, bn), _at_out),
        out_shape=jax.ShapeDtypeStruct((rows, N), stored_dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32), *[pltpu.VMEM((G, bn), jnp.float32)] * (not across)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(flops=2 * rows * N * K * expansion, bytes_accessed=num_bytes, transcendentals=0),
        interpret=interpret,
        name="quantized_matmul",
    )(*operands)
    return out[:M].astype(out_dtype)


def _operand_type(dtype: Any, weight: QuantizedWeight, expansion: int) -> jnp.dtype:
    """Returns the type in which the MXU multiplies: exact for x and for the codes."""
    if dtype == jnp.int8 and weight.bits == 8 and expansion == 1:
        return jnp.dtype(jnp.int8)
    return jnp.dtype(jnp.float32 if dtype in (jnp.float32, jnp.float16) else jnp.bfloat16)


def _at_x(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return 0, m, k


def _at_w(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return n, k


def _at_n(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return n, 0


def _at_n_across(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return 0, n


def _at_m(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return m, 0


def _at_out(m: Any, n: Any, k: Any) -> tuple[Any, ...]:
    return m, n


def _kernel(
    x_ref,  # [planes, block_m, block_l]
    w_ref,  # [block_n, block_l]
    scale_ref,  # [G, block_n] if `across`, else [block_n, G]; so is that of the zero points
    *refs,
    one_group: bool,
    across: bool,
    lanes: int,
    unit: int,
    planes_have_groups: bool,
    has_zero: bool,
    has_x_scale: bool,
):
    refs = list(refs)
    zero_ref, sums_ref = (refs.pop(0), refs.pop(0)) if has_zero else (None, None)
    x_scale_ref = refs.pop(0) if has_x_scale else None
    out_ref, acc_ref, *rest = refs
    scales_ref = rest[0] if rest else scale_ref  # [G, block_n]
    planes, block_m, block_l = x_ref.shape
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _start():
        if not across:
            scales_ref[...] = scale_ref[...].T
        if zero_ref is None or sums_ref is None:
            acc_ref[...] = jnp.zeros_like(acc_ref)
        elif one_group:
            acc_ref[...] = -sums_ref[...] * zero_ref[...]
        else:
            offsets = scale_ref[...] * zero_ref[...]
            acc_ref[...] = -_dot(sums_ref[...], offsets, _ROWS if across else _INPUTS)

    for start in range(0, block_l, unit):
        width = min(unit, block_l - start)
        codes = w_ref[:, start : start + width]
        parts = [
            _dot(_expand(x_ref[p, :, start : start + width], lanes), _convert(codes, p, planes, x_ref.dtype))
            for p in range(planes)
        ]
        if one_group:
            for part in parts:
                acc_ref[...] += part
            continue
        if not planes_have_groups:
            parts = [functools.reduce(jnp.add, parts)]
        first = k * (block_l // lanes) + start // lanes
        for j in range(parts[0].shape[0] // block_m):
            for p, part in enumerate(parts):
                group = (first + j) * len(parts) + p
                acc_ref[...] += part[j * block_m : (j + 1) * block_m] * scales_ref[pl.ds(group, 1), :]

    @pl.when(k == pl.num_programs(2) - 1)
    def _finish():
        out = acc_ref[...]
        if one_group:
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


def _dot(x: jax.Array, w: jax.Array, dimensions: Any = _INPUTS) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    accumulator = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    product = lax.dot_general(x, w, dimensions, precision=precision, preferred_element_type=accumulator)
    return product.astype(jnp.float32)
