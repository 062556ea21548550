"""Cases of the KV write that every backend runs, poisoned, and their comparison with the reference."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.reference import write_kv_reference
from pallas_kernels.pages import FLOAT8, QuantizedPages, dequantize

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class Case:
    """`k` and `v`: how each is stored; `half`: rotated pairs, 0 for none; the last `padding` tokens are padding."""

    k: str
    v: str
    T: int = 6
    K: int = 2
    H: int = 64
    half: int = 0
    dtype: str = "bf16"
    padding: int = 1
    page_size: int = 4
    P: int = 4

    def __str__(self) -> str:
        return f"{self.k}-{self.v}-{self.T}x{self.K}x{self.H}-rotary{2 * self.half}"


def make(case: Case) -> tuple[Any, ...]:
    """Returns k_pages, v_pages, k, v, slot_mapping, rope: NaN in all pages, and in k and v of padding tokens."""
    rng = np.random.default_rng(case.T)
    real = case.T - case.padding
    slots = np.zeros(case.T, np.int32)
    slots[:real] = case.page_size + rng.permutation((case.P - 1) * case.page_size)[:real]
    new = rng.standard_normal((2, case.T, case.K, case.H)) * 3
    new[:, real:] = np.nan
    k, v = (jnp.asarray(x, DTYPES[case.dtype]) for x in new)
    rope = None
    if case.half:
        angles = rng.uniform(0, 6, (case.T, case.half))
        rope = (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32))
    return _pages(case.k, case, rng), _pages(case.v, case, rng), k, v, jnp.asarray(slots), rope


def _pages(kind: str, case: Case, rng: np.random.Generator) -> Any:
    shape = (case.K, case.P, case.page_size, case.H)
    if kind in DTYPES:
        return jnp.full(shape, jnp.nan, DTYPES[kind])
    bits = {"int8": 8, "fp8": 8, "int4": 4, "int2": 2}[kind]
    data = rng.integers(0, 120, (*shape[:3], case.H * bits // 8))
    dtype = {"int8": jnp.int8, "fp8": FLOAT8}.get(kind, jnp.uint8)
    scale = jnp.full(shape[:3], jnp.nan, jnp.float32)
    return QuantizedPages(jnp.asarray(data).astype(dtype), scale, None if bits == 8 else scale, bits, "token")


def check(case: Case, arguments: tuple[Any, ...], got: Any, zero_points_are_exact: bool = True) -> None:
    """Compares `got` with the reference: every byte outside the slots kept, what was written equal or nearly so.

    Codes with a zero point come from `x / scale + zero`, which XLA may contract: other compilers may round otherwise.
    """
    *positional, rope = arguments
    wanted = jax.jit(lambda *a: write_kv_reference(*a, rope=rope))(*positional)
    slots = np.asarray(arguments[4])
    for name, old, new, reference in zip("kv", arguments[:2], got, wanted):
        for before, after, ref in zip(*(jax.tree.leaves(x) for x in (old, new, reference))):
            before, after, ref = (_slots(x) for x in (before, after, ref))
            kept = np.setdiff1d(np.arange(case.page_size, before.shape[1]), slots)
            np.testing.assert_array_equal(_bytes(after[:, kept]), _bytes(before[:, kept]), err_msg=f"{name} unwritten")
        written = slots[slots >= case.page_size]
        exact = not (name == "k" and case.half) and (zero_points_are_exact or getattr(new, "zero", None) is None)
        if exact:  # the same arithmetic on the same rows
            for after, ref in zip(jax.tree.leaves(new), jax.tree.leaves(reference)):
                np.testing.assert_array_equal(
                    _bytes(_slots(after)[:, written]), _bytes(_slots(ref)[:, written]), err_msg=name
                )
            continue
        after, ref = (_slots(dequantize(x)).astype(np.float32)[:, written] for x in (new, reference))
        if not isinstance(new, QuantizedPages):
            tolerance = {"f32": 1e-5, "bf16": 1e-2, "f16": 1e-3}[case.dtype]
            np.testing.assert_allclose(after, ref, rtol=tolerance, atol=tolerance, err_msg=name)
            continue
        # Where the rotation's last bit differs, a code at the edge between two may be the next one, seldom.
        off = ~np.isclose(after, ref, rtol=1e-2, atol=1e-2)
        assert off.mean() <= 0.01, f"{name}: {off.sum()} of {off.size} values differ"
        step = _slots(reference.scale)[:, written, None] * (32 if new.data.dtype == FLOAT8 else 1)
        assert (np.abs(after - ref) <= 1.01 * step).all(), f"{name}: a value differs by more than one step"


def _slots(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8)


DEFAULT = (
    Case("bf16", "bf16", half=32, padding=3),  # padding in two blocks: both must leave the null page alone
    Case("int8", "int4", half=32, T=5),
    Case("bf16", "bf16", T=1, H=80, padding=0),
)
SLOW = (
    Case("int2", "fp8", half=64, H=128),
    Case("int4", "int2", half=32, H=128),
    Case("fp8", "bf16", T=3, K=1, half=32),
    Case("int4", "int8", H=256, half=64, T=4),
    Case("f32", "f32", T=2, H=128, half=64, dtype="f32", padding=0),
    Case("bf16", "int8", H=96, half=48),
    Case("f32", "bf16", T=9, H=64, P=2, page_size=16, padding=0),
)
FLOAT16 = Case("f16", "f16", dtype="f16", half=32, T=3)
EMPTY = Case("bf16", "int8", T=4, padding=4)
CASES = (*DEFAULT, *SLOW, EMPTY)
