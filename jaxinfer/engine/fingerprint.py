"""Names what the content of a KV page depends on beside its tokens, for pages that outlive the process."""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.params import Params
from jaxinfer.model.spec import DecoderSpec

FORMAT = 1  # of a page's bytes


def fingerprint(decoder: DecoderSpec, params: Params, kv: KVSpec, page_size: int) -> bytes:
    """Returns 32 bytes that differ for other weights, other options of the decoder, other precisions or page sizes.

    Weights count by a checksum of 64 bits a tensor, made on the device at the speed of its memory. It tells models
    apart that differ by accident, not ones made to be taken for each other.
    """
    named = dataclasses.replace(decoder, dtype=jnp.dtype(decoder.dtype).name, implementation=None)
    leaves, tree = jax.tree.flatten(params)
    sums = [_checksum(leaf) for leaf in leaves]  # all enqueued before any is read
    parts = (
        FORMAT, repr(named), repr(kv), page_size, str(tree),
        [(leaf.shape, str(leaf.dtype)) for leaf in leaves], [total.tolist() for total in jax.device_get(sums)],
    )  # fmt: skip
    return hashlib.blake2b(repr(parts).encode(), digest_size=32).digest()


@jax.jit
def _checksum(array: Any) -> jax.Array:
    """Returns two sums, u32[2], over all elements mixed with their places."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    words = lax.bitcast_convert_type(array, unsigned).ravel().astype(jnp.uint32)
    place = lax.iota(jnp.uint32, words.size)
    mixed = _mix(words ^ _mix(place))
    return jnp.stack([jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(_mix(mixed + jnp.uint32(1)), dtype=jnp.uint32)])


def _mix(x: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
