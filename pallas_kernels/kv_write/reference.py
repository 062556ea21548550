"""The semantic of the KV write, which XLA lowers to in-place scatters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import FLOAT8, Pages, QuantizedPages, quantize


def write_kv_reference(
    k_pages: Pages,
    v_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int[Array, "*K T"],
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[Pages, Pages]:
    """See `write_kv`. Several padding tokens may share a slot of the null page; which of them stays is undefined.

    Bytes: k and v once, what is stored of them once; FLOPs: 3 an element for the rotation, about 4 for quantization.
    """
    if rope is not None:
        k = rotate(k, *rope)
    return _write(k_pages, k, slot_mapping), _write(v_pages, v, slot_mapping)


def rotate(x: Float[Array, "T K H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]) -> Float[Array, "T K H"]:
    """Returns x with every pair (x[i], x[i + half]) of its first 2 * half channels rotated, in f32.

    The half-rotation form of RoFormer (Su et al., 2021); the channels after the rotary ones are passed through.
    """
    half = cos.shape[-1]
    x1, x2, rest = jnp.split(x, (half, 2 * half), axis=-1)
    x1, x2 = x1.astype(jnp.float32), x2.astype(jnp.float32)
    cos, sin = cos[:, None], sin[:, None]
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated


def encode(pages: Pages, new: Float[Array, "T K H"]) -> Pages:
    """Returns `new` as `pages` store it, as pages [K, T, 1, H] of one token each."""
    new = new.transpose(1, 0, 2)[:, :, None]
    if isinstance(pages, QuantizedPages):
        return quantize(new, pages.bits, "token", float8=pages.data.dtype == FLOAT8)
    return new.astype(pages.dtype)


def scatter(stored: jax.Array, new: jax.Array, slot_mapping: Int[Array, "*K T"]) -> jax.Array:
    """Returns `stored` [K, P, page_size, ...] with new[:, t, 0] at slot `slot_mapping[t]`, or that of each head."""
    K, P, page_size, *rest = stored.shape
    slots = stored.reshape(K, P * page_size, *rest)
    index = slot_mapping.astype(jnp.uint32)  # unsigned: no handling of negative values is compiled in
    head = slice(None) if index.ndim == 1 else jnp.arange(K, dtype=jnp.uint32)[:, None]
    return slots.at[head, index].set(new[:, :, 0], mode="promise_in_bounds").reshape(stored.shape)


def _write(pages: Pages, new: Float[Array, "T K H"], slot_mapping: Int[Array, "*K T"]) -> Pages:
    return jax.tree.map(lambda stored, x: scatter(stored, x, slot_mapping), pages, encode(pages, new))
