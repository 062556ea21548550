"""Attention with open pages against float64 loops: full pages as they are packed, a token's own page exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import ModelConfig
from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.batch import TokenBatch
from jaxinfer.model.kv_cache import KVCache
from jaxinfer.model.open_pages import attend, packed_view, plan_open_pages
from pallas_kernels.paged_attention import make_schedule
from pallas_kernels.pages import QuantizedPages, dequantize, quantize

CONFIG = ModelConfig("llama", 10, 128, 64, 1, 4, 2, 32, 1024, 1e-6, 1e4)
K, N, H, PS, M, T, S, SLOTS = 2, 4, 32, 32, 5, 136, 4, 5
ROW_SLOTS = np.array([3, 0, 4, 0], np.int32)  # the last row is empty
STEPS = (  # tokens of each row; None: a decode step
    (70, 5, 31),  # over several pages, within one, up to the last place of one
    (25, 1, 1),  # row 2 fills its page with one token
    (1, 90, 0),  # row 0 fills a page, row 1 two; row 2 has no part in it
    None,
    None,
    (3, 1, 64),
)


@functools.partial(jax.jit, static_argnames=("window", "implementation"))
def step(q, k, v, layer, batch, window, implementation):
    pages, opened = layer
    view, _ = packed_view(batch, PS, window)
    schedule = make_schedule(len(q), PS, M, view.kv_lens, view.cu_q_lens, view.num_decode_rows, window)
    plan = plan_open_pages(batch, PS, opened[0].shape[1], window)
    (out, _), pages, opened = attend(
        q, k, v, pages, opened, batch, schedule, plan, rope=None, scale=H**-0.5, window=window,
        implementation=implementation, write_implementation=None,
    )  # fmt: skip
    return out, (pages, opened)


def empty_layer(kv):
    """Nothing but NaN, as far as the formats have it."""
    cache = KVCache.init(CONFIG, 1 + S * M, PS, kv, num_slots=SLOTS)
    poison = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 119))
    return poison((cache.k_pages[0], cache.v_pages[0])), poison(cache.open_pages[0])


def as_packed(values, name, axis):
    """Float64 values of full pages [K, P, page_size, H] as the cache holds them."""
    if name == "float32":
        return values
    bits = {"int4": 4, "int2": 2, "int8": 8}[name]
    return np.asarray(dequantize(quantize(jnp.asarray(values, jnp.float32), bits, axis)), np.float64)


def expected(q, k, v, position, window, kv):
    """q [N, H] at `position`; k and v [K, tokens, H]."""
    own, first = position // PS * PS, max(0, position - window + 1) if window else 0
    sides = []
    for x, name, axis in ((k, kv.k, "channel" if kv.k in ("int4", "int2") else "token"), (v, kv.v, "token")):
        full = x[:, :own].reshape(K, -1, PS, H)
        full = as_packed(full, name, axis).reshape(K, -1, H) if own else full.reshape(K, 0, H)
        sides.append(np.concatenate([full, x[:, own : position + 1]], axis=1)[:, first:])
    keys, values = (np.repeat(x, N // K, axis=0) for x in sides)
    scores = np.einsum("nh,nsh->ns", q, keys) * H**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ns,nsh->nh", weights / weights.sum(axis=1, keepdims=True), values)


def batch_of(counts, lens, table):
    """Rows are in order; a ragged batch has T tokens, a decode step S."""
    if counts is None:
        active = np.arange(S) < 3
        positions = np.where(active, lens, 0).astype(np.int32)
        return TokenBatch(
            np.zeros(S, np.int32), positions, np.zeros(S, np.int32), table,
            np.where(active, lens + 1, 0).astype(np.int32), np.arange(S + 1, dtype=np.int32), None, ROW_SLOTS,
        ), [1, 1, 1]  # fmt: skip
    counts = [*counts, 0]
    positions = np.zeros(T, np.int32)
    positions[: sum(counts)] = np.concatenate([lens[s] + np.arange(n) for s, n in enumerate(counts)])
    cu = np.cumsum([0, *counts]).astype(np.int32)
    leading = next(s for s, n in enumerate([*counts, 2]) if n != 1)
    return TokenBatch(
        np.zeros(T, np.int32), positions, np.zeros(T, np.int32), table, (lens + counts).astype(np.int32), cu,
        np.int32(leading), ROW_SLOTS,
    ), counts[:3]  # fmt: skip


@pytest.mark.parametrize(
    ("kv_dtype", "window", "implementation"),
    [
        ("int4", None, None),
        pytest.param("int2", 40, "xla", marks=pytest.mark.slow),
        *(pytest.param(kv, w, i, marks=pytest.mark.slow)
          for kv in ("int4,float32", "int8,int4", "int2,int4") for w in (None, 9) for i in (None, "xla", "reference")),
    ],
)  # fmt: skip
def test_matches_float64(kv_dtype, window, implementation, rng):
    kv = KVSpec.parse(kv_dtype, "float32")
    table = np.zeros((S, M), np.int32)
    table[:3] = 1 + rng.permutation(S * M)[: 3 * M].reshape(3, M)
    lens, layer = np.zeros(S, np.int64), empty_layer(kv)
    history = [np.zeros((2, K, 0, H)) for _ in range(3)]
    for counts in STEPS:
        batch, counts = batch_of(counts, lens, table)
        size, used = len(batch.positions), sum(counts)
        q, k, v = (np.full((size, n, H), np.nan, np.float32) for n in (N, K, K))
        for x in (q, k, v):
            x[:used] = rng.standard_normal(x[:used].shape)
        (again, _), (out, layer) = (step(q, k, v, layer, batch, window, implementation) for _ in range(2))
        t = 0
        for s, n in enumerate(counts):
            history[s] = np.concatenate([history[s], np.stack([k, v])[:, t : t + n].transpose(0, 2, 1, 3)], axis=2)
            for i in range(n):
                want = expected(np.float64(q[t + i]), *history[s], lens[s] + i, window, kv)
                np.testing.assert_allclose(out[t + i], want, atol=2e-5, rtol=2e-5, err_msg=f"row {s}, {lens[s] + i}")
            t += n
            lens[s] += n
        np.testing.assert_array_equal(out, again, err_msg="the same step once more")
        if size == T:
            np.testing.assert_array_equal(out[used:], 0)
    assert isinstance(layer[0][0], QuantizedPages)
