"""Cases of flash attention for every backend, and what they must give: a float64 oracle that knows no blocks.

`make(CASES[name])` gives the arrays, `expected(arrays)` out, lse, dq, dk and dv (gradients for `arrays.d_out` and
`arrays.d_lse`), `check(arrays, results)` compares. Segment id `Q_PADDING` is on no key and `K_PADDING` on no query;
with `poison` they hold NaN, which may reach nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.flash_attention.float8 import dequantize_blocks, quantize_for_flash

Q_PADDING, K_PADDING = -1, -2
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2, "float8": 1e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    num_q: int
    num_k: int
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 16
    batch: int = 1
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    segments: tuple[tuple[int, int], ...] | None = None  # (queries, keys) of each, in order; the rest is padding
    shuffled: bool = False  # segment ids in no order
    poison: bool = True
    looser: float = 1.0  # factor on the tolerance: exp(s) has the relative error eps * |s|

    @property
    def options(self):
        """The keywords that `flash_attention` and every backend share."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return {
            "scale": scale, "causal": self.causal, "sliding_window": self.sliding_window, "soft_cap": self.soft_cap,
        }  # fmt: skip


CASES = {
    "one": Case(1, 1),
    "one_query": Case(1, 129, soft_cap=5.0),
    "edge_63": Case(63, 63, sliding_window=9),
    "edge_64": Case(64, 64, num_heads=3, num_kv_heads=3),
    "edge_65": Case(65, 65, num_heads=6, num_kv_heads=2, soft_cap=2.0),
    "edge_127": Case(127, 127, batch=2, scale=0.3),
    "edge_128": Case(128, 128, num_heads=4, num_kv_heads=4, sliding_window=64),
    "edge_129": Case(129, 129, num_heads=4, num_kv_heads=2),
    "more_keys": Case(65, 300, num_heads=4, num_kv_heads=2, batch=2),
    "more_queries": Case(300, 129, num_heads=4, num_kv_heads=2),  # 171 queries see nothing
    "not_causal": Case(70, 130, causal=False, soft_cap=3.0),
    "not_causal_more_queries": Case(130, 64, causal=False),
    "window_one": Case(130, 130, sliding_window=1),
    "window_more_keys": Case(65, 300, sliding_window=70, soft_cap=4.0),
    "window_more_queries": Case(200, 129, sliding_window=40),
    "window_above_length": Case(66, 66, sliding_window=1000),
    "segments_one": Case(65, 65, segments=((65, 65),)),  # ranges of ids that meet in one number
    "segments": Case(200, 200, num_heads=4, num_kv_heads=2, segments=((3, 3), (130, 130), (40, 40), (20, 20))),
    "segments_batch": Case(130, 130, batch=2, segments=((65, 65), (50, 50)), soft_cap=5.0),
    "segments_window": Case(260, 260, segments=((150, 150), (90, 90)), sliding_window=33),
    "segments_not_causal": Case(130, 200, segments=((64, 70), (1, 100), (30, 0), (20, 10)), causal=False),
    "segments_more_keys": Case(70, 200, segments=((10, 120), (50, 60)), sliding_window=90),
    "segments_shuffled": Case(140, 140, segments=((50, 50), (60, 60)), shuffled=True, causal=False),
    "segments_all_options": Case(
        200, 264, num_heads=6, num_kv_heads=2, segments=((100, 150), (80, 90)), sliding_window=60, soft_cap=2.0,
        scale=0.5, batch=2,
    ),
    "large_scores": Case(130, 130, scale=20.0, looser=10.0),  # exp(score) overflows
    "mqa": Case(130, 130, num_heads=8, num_kv_heads=1),
    "head_dim_64": Case(70, 70, head_dim=64),
    "head_dim_80": Case(70, 70, head_dim=80),
    "head_dim_96": Case(70, 70, head_dim=96),
    "head_dim_128": Case(70, 70, head_dim=128),
    "head_dim_256": Case(70, 70, head_dim=256),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arguments of one case; `q_scale`, `k_scale` and `v_scale` with dtype "float8" alone."""

    case: Case
    dtype: str
    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    d_lse: jax.Array
    q_segment_ids: jax.Array | None
    kv_segment_ids: jax.Array | None
    q_scale: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @property
    def scales(self):
        return {name: getattr(self, name) for name in ("q_scale", "k_scale", "v_scale")}

    @property
    def segments(self):
        return {name: getattr(self, name) for name in ("q_segment_ids", "kv_segment_ids")}


def make(case, dtype="float32", *, head_dim=None, seed=0):
    """Returns the `Arrays` of a case in "float32", "bfloat16", "float16" or "float8"."""
    if head_dim is not None:
        case = dataclasses.replace(case, head_dim=head_dim)
    rng = np.random.default_rng(seed)
    B, T, S, N, K, H = (
        case.batch, case.num_q, case.num_k, case.num_heads, case.num_kv_heads, case.head_dim
    )  # fmt: skip
    q, d_out = rng.standard_normal((2, B, T, N, H))
    k, v = rng.standard_normal((2, B, S, K, H))
    d_lse = rng.standard_normal((B, N, T))
    ids = [None, None]
    if case.segments is not None:
        lengths = zip(*case.segments)
        ids = [_segment_ids(rng, n, size, B, pad, case.shuffled)
               for n, size, pad in zip(lengths, (T, S), (Q_PADDING, K_PADDING))]  # fmt: skip
        if case.poison and dtype != "float8":
            for x in (q, d_out):
                x[ids[0] == Q_PADDING] = np.nan
            for x in (k, v):
                x[ids[1] == K_PADDING] = np.nan
            d_lse[np.broadcast_to((ids[0] == Q_PADDING)[:, None], d_lse.shape)] = np.nan
    storage = "bfloat16" if dtype == "float8" else dtype
    q, k, v, d_out = (jnp.asarray(x, storage) for x in (q, k, v, d_out))
    scales = {}
    if dtype == "float8":
        scales = quantize_for_flash(q, k, v)._asdict()
        q, k, v = (scales.pop(name) for name in "qkv")
    ids = [None if x is None else jnp.asarray(x) for x in ids]
    return Arrays(case, dtype, q, k, v, d_out, jnp.asarray(d_lse, jnp.float32), *ids, **scales)


def visible(arrays):
    """Returns bool[B, T, S]: which query sees which key, by the definition."""
    case = arrays.case
    t = np.arange(case.num_q)[:, None] + case.num_k - case.num_q
    j = np.arange(case.num_k)[None]
    mask = np.ones((case.batch, case.num_q, case.num_k), bool)
    if case.causal:
        mask &= j <= t
    if case.sliding_window is not None:
        mask &= j > t - case.sliding_window
    if arrays.q_segment_ids is not None:
        mask &= np.asarray(arrays.q_segment_ids)[:, :, None] == np.asarray(arrays.kv_segment_ids)[:, None]
    return mask


def expected(arrays):
    """Returns out, lse, dq, dk, dv in float64, a head and a batch row at a time."""
    case, mask = arrays.case, visible(arrays)
    q, k, v = (
        np.asarray(dequantize_blocks(x, scale), np.float64)
        for x, scale in zip((arrays.q, arrays.k, arrays.v), arrays.scales.values())
    )
    d_out, d_lse = np.asarray(arrays.d_out, np.float64), np.asarray(arrays.d_lse, np.float64)
    out, lse = np.zeros(q.shape), np.full(d_lse.shape, -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    group = case.num_heads // case.num_kv_heads
    scale, cap = case.options["scale"], case.soft_cap
    for b in range(case.batch):
        rows, columns = mask[b].any(1), mask[b].any(0)
        if not rows.any():
            continue
        seen = mask[b][rows][:, columns]
        for n in range(case.num_heads):
            qn, don, dln = q[b, rows, n], d_out[b, rows, n], d_lse[b, n, rows]
            kn, vn = k[b, columns, n // group], v[b, columns, n // group]
            s = qn @ kn.T * scale
            slope = scale
            if cap is not None:
                s = cap * np.tanh(s / cap)
                slope = scale * (1 - (s / cap) ** 2)
            s = np.where(seen, s, -np.inf)
            m = s.max(1, keepdims=True)
            total = np.exp(s - m).sum(1, keepdims=True)
            p = np.exp(s - m) / total
            out[b, rows, n], lse[b, n, rows] = p @ vn, (m + np.log(total))[:, 0]
            ds = p * (don @ vn.T - (don * (p @ vn)).sum(1, keepdims=True) + dln[:, None]) * slope
            dq[b, rows, n] = ds @ kn
            dk[b, columns, n // group] += ds.T @ qn
            dv[b, columns, n // group] += p.T @ don
    return out, lse, dq, dk, dv


def check(arrays, results, wanted=None):
    """Asserts that `results`, the first so many of (out, lse, dq, dk, dv), agree with the oracle.

    Gradients are sums of many terms that were rounded: their tolerance is relative to the largest entry.
    """
    tolerance = TOLERANCE[arrays.dtype] * arrays.case.looser
    wanted = expected(arrays) if wanted is None else wanted
    for name, result, want in zip(("out", "lse", "dq", "dk", "dv"), results, wanted):
        result = np.asarray(result, np.float64)
        assert result.shape == want.shape, name
        largest = np.max(np.abs(want), where=np.isfinite(want), initial=1.0)
        atol = tolerance if name in ("out", "lse") else tolerance * largest
        np.testing.assert_allclose(result, want, rtol=tolerance, atol=atol, err_msg=name)


def _segment_ids(rng, lengths, size, batch, padding, shuffled):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.concatenate([ids, np.full(size - len(ids), padding)]).astype(np.int32)
    if shuffled:
        return np.stack([rng.permutation(ids) for _ in range(batch)])
    return np.stack([np.roll(ids, 7 * b) for b in range(batch)])


def compiled(attend, arrays):
    """Returns a function of nothing that gives (out, lse, dq, dk, dv); float8: (out, lse).

    Args:
        attend: `flash_attention` with an implementation, or an entry of `IMPLEMENTATIONS`.
        arrays: the case.
    """
    options = {**arrays.case.options, "return_lse": True}

    def forward(q, k, v, segments, scales):
        return attend(q, k, v, **segments, **scales, **options)

    def both(q, k, v, segments, d_out, d_lse):
        result, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, **segments, **options), q, k, v)
        return *result, *pull_back((d_out, d_lse))

    function, arguments = both, (arrays.q, arrays.k, arrays.v, arrays.segments, arrays.d_out, arrays.d_lse)
    if arrays.dtype == "float8":
        function, arguments = forward, (arrays.q, arrays.k, arrays.v, arrays.segments, arrays.scales)
    return functools.partial(jax.jit(function), *arguments)


def run(attend, arrays):
    """Returns (out, lse, dq, dk, dv); float8: (out, lse)."""
    return compiled(attend, arrays)()


def check_twice(attend, arrays):
    """Checks an implementation against the oracle, and that a second run gives the same bits."""
    function = compiled(attend, arrays)
    first, second = function(), function()
    check(arrays, first)
    for a, b in zip(first, second):
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
