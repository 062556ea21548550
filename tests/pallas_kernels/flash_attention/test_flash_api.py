"""flash_attention through its public function: the reference and XLA forms, gradients, transformations, errors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.flash_attention import api, flash_attention, quantize_for_flash, xla
from pallas_kernels.flash_attention.specs import SPECS
from pallas_kernels.flash_attention.visibility import Visibility
from pallas_kernels.flash_attention.vjp import with_backward
from tests.pallas_kernels.flash_attention.cases import CASES, Case, check, check_twice, expected, make, run, visible
from tests.pallas_kernels.targets import lower, targeting

FEW = ["one", "more_queries", "segments_all_options"]


# Every option is in some case of the default run.
ALWAYS = [
    "one", "one_query", "edge_65", "edge_128", "more_keys", "not_causal", "segments_not_causal", "segments_all_options",
]  # fmt: skip
MORE = [
    "edge_63", "edge_127", "edge_129", "more_queries", "window_one", "window_more_keys", "window_above_length",
    "segments", "segments_batch", "segments_window", "segments_shuffled", "large_scores", "head_dim_80", "head_dim_256",
]  # fmt: skip


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(n, marks=pytest.mark.slow) for n in MORE)])
def test_xla(name):
    check_twice(functools.partial(flash_attention, implementation="xla"), make(CASES[name]))


@pytest.mark.parametrize("name", [*FEW, pytest.param("segments_not_causal", marks=pytest.mark.slow)])
def test_reference(name):
    check_twice(functools.partial(flash_attention, implementation="reference"), make(CASES[name]))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow), "float8"])
@pytest.mark.parametrize("name", ["window_more_keys", pytest.param("segments_all_options", marks=pytest.mark.slow)])
def test_xla_in_16_and_8_bits(name, dtype):
    check_twice(functools.partial(flash_attention, implementation="xla"), make(CASES[name], dtype))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in FEW])
def test_xla_agrees_with_the_derivative_of_the_reference(name):
    arrays = make(CASES[name])
    results = (run(functools.partial(flash_attention, implementation=name), arrays) for name in ("xla", "reference"))
    for a, b in zip(*results):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["more_queries", pytest.param("segments_all_options", marks=pytest.mark.slow)])
def test_xla_with_small_blocks(name):
    arrays = make(CASES[name])
    tiles = {"tiles": (16, 32)}
    attend = with_backward(
        functools.partial(xla.flash_attention_xla, **tiles),
        functools.partial(xla.flash_attention_backward_xla, **tiles),
    )
    # Backends are given keys without NaN; through the public function that is taken care of.
    clean = dataclasses.replace(arrays, k=jnp.nan_to_num(arrays.k), v=jnp.nan_to_num(arrays.v))
    check(clean, run(attend, clean))


@pytest.mark.parametrize("sliding_window", [None, 1, 5, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_are_skipped_exactly_where_nothing_is_visible(causal, sliding_window):
    if sliding_window is not None and not causal:
        return
    for num_q, num_k in ((1, 1), (33, 33), (20, 50), (50, 20), (7, 64)):
        arrays = make(Case(num_q, num_k, causal=causal, sliding_window=sliding_window, head_dim=1))
        mask, rule = visible(arrays)[0], Visibility(num_q, num_k, causal, sliding_window)
        block_q, block_k = 8, 16
        pairs = [(i, j) for i in range(-(-num_q // 8)) for j in range(-(-num_k // 16))]
        for i, j in pairs:
            tile = mask[i * block_q :][:block_q, j * block_k :][:, :block_k]
            by_query, by_key = rule.key_blocks(i, block_q, block_k), rule.query_blocks(j, block_q, block_k)
            assert tile.any() <= (by_query[0] <= j < by_query[1])
            assert tile.any() <= (by_key[0] <= i < by_key[1])
            whole = i * block_q + block_q <= num_q and j * block_k + block_k <= num_k
            assert not whole or tile.all() == rule.sees_all(i, j, block_q, block_k)
            traced = rule.key_blocks(jnp.int32(i), block_q, block_k), rule.query_blocks(jnp.int32(j), block_q, block_k)
            assert jax.tree.map(int, traced) == (by_query, by_key)
        assert rule.num_pairs == mask.sum()


def test_without_lse_and_with_the_default_scale():
    arrays = make(CASES["edge_65"])
    out = flash_attention(arrays.q, arrays.k, arrays.v, soft_cap=2.0)
    check(arrays, (out,))


def test_float8_has_no_gradient():
    arrays = make(CASES["edge_65"], "bfloat16")

    def loss(q):
        return jnp.sum(flash_attention(**quantize_for_flash(q, arrays.k, arrays.v)._asdict()).astype(jnp.float32))

    with pytest.raises(ValueError, match="no gradient in float8; pass q, k and v in bfloat16"):
        jax.grad(loss)(arrays.q)


def test_quantization_keeps_the_largest_of_each_block():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 200, 3, 8)), jnp.float32)
    quantized = quantize_for_flash(x, x, jnp.zeros_like(x))
    assert quantized.q_scale.shape == (2, 3, 2)
    np.testing.assert_allclose(quantized.q_scale[0, 1, 1] * 448, jnp.max(jnp.abs(x[0, 128:, 1])), rtol=1e-6)
    scale = np.repeat(np.asarray(quantized.k_scale), 128, axis=2)[..., :200].transpose(0, 2, 1)[..., None]
    np.testing.assert_allclose(np.asarray(quantized.k, np.float32) * scale, x, rtol=1 / 16, atol=1e-2)
    assert not np.any(np.asarray(quantized.v, np.float32))
    np.testing.assert_array_equal(quantized.v_scale, 1)


def test_vmap_and_the_gradient_of_an_argument_that_is_not_mapped():
    arrays = make(CASES["segments_batch"])
    k, v = jnp.nan_to_num(arrays.k), jnp.nan_to_num(arrays.v)
    q = jnp.nan_to_num(jnp.stack([arrays.q, arrays.q * 0.5, -arrays.q]))

    def loss(q, k, implementation):
        f = functools.partial(flash_attention, **arrays.segments, implementation=implementation)
        return jnp.sum(jnp.sin(jax.vmap(f, (0, None, None))(q, k, v)))

    found, wanted = (jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(q, k, i) for i in ("xla", "reference"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, wanted)


def test_inside_shard_map():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    arrays = make(Case(65, 65, num_heads=4, num_kv_heads=2, batch=2))
    spec = PartitionSpec("data", None, "model")

    def attend(q, k, v, return_lse, **options):
        assert return_lse
        f = functools.partial(
            flash_attention, return_lse=True, **{n: o for n, o in options.items() if "segment" not in n}
        )
        specs = {"in_specs": spec, "out_specs": (spec, PartitionSpec("data", "model"))}
        return jax.shard_map(f, mesh=mesh, check_vma=False, **specs)(q, k, v)

    check(arrays, run(attend, arrays))


def test_one_backend_serves_forward_and_backward(monkeypatch):
    calls = []

    def double(name, function):
        def recorded(*arguments, **options):
            calls.append(name)
            return function(*arguments, **options)

        return recorded

    def declines(*arguments, **options):
        raise NotImplementedError("not today")

    fast = with_backward(
        double("fast", xla.flash_attention_xla), double("fast backward", xla.flash_attention_backward_xla)
    )
    slow = with_backward(double("slow", xla.flash_attention_xla), double("slow backward", declines))
    arrays = make(CASES["one"])
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"no": with_backward(declines, declines), "fast": fast, "slow": slow})
    check(arrays, run(flash_attention, arrays))
    assert set(calls) == {"fast", "fast backward"}
    # A backward pass that declines is an error: another backend would not know the forward pass's rounding.
    with pytest.raises(NotImplementedError, match=r"has no such gradient .*not today.* name another"):
        run(functools.partial(flash_attention, implementation="slow"), arrays)


def test_cpu_takes_xla_and_the_others_say_why():
    q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    for name, reason in {
        "mosaic_gpu": "needs a Hopper GPU", "mosaic_tpu": "needs a TPU", "cudnn": "needs an NVIDIA GPU",
    }.items():  # fmt: skip
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(functools.partial(flash_attention, implementation=name), q, q, q)
    assert "while" in str(jax.make_jaxpr(flash_attention)(*(jnp.ones(q.shape, q.dtype),) * 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"soft_cap": 3.0}, "no soft cap"),
        ({"q_segment_ids": 0, "kv_segment_ids": 0}, "no segment ids"),
        ({"return_lse": True}, "no exact lse"),
        ({"num_k": 128}, "T == S"),
        ({"dtype": jnp.float32}, "bfloat16 or float16"),
        ({"head_dim": 256}, "at most 128"),
        ({"head_dim": 60}, "multiple of 8"),
        ({"target": "v5e"}, "needs an NVIDIA GPU"),
        ({}, "cuDNN is not detected"),
    ],
)
def test_cudnn_declines(change, reason):
    change = dict(change)
    H, dtype, target = change.pop("head_dim", 64), change.pop("dtype", jnp.bfloat16), change.pop("target", "a100")
    q, k = (jax.ShapeDtypeStruct((1, n, 2, H), dtype) for n in (64, change.pop("num_k", 64)))
    change = {n: jnp.zeros((1, 64), jnp.int32) if "segment" in n else x for n, x in change.items()}
    with targeting(target), pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(functools.partial(flash_attention, implementation="cudnn", **change), q, k, k)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (64, 2, 64)}, r"q must have shape \[B, T, N, H\]"),
        ({"k": (1, 64, 2, 32)}, r"k must have shape \[B=1, S, K, H=64\] without zeros, got \(1, 64, 2, 32\)"),
        ({"v": (1, 64, 1, 64)}, "k and v must have one shape"),
        ({"v": (1, 0, 2, 64)}, "v must have shape .* without zeros"),
        ({"q": (1, 64, 3, 64)}, "3 query heads must be a multiple of the 2 KV heads"),
        ({"dtype": jnp.int8}, "got int8"),
        ({"sliding_window": 0}, "sliding_window must be at least 1 or None, got 0"),
        ({"sliding_window": 4, "causal": False}, "needs causal=True"),
        ({"soft_cap": 0.0}, "soft_cap must be positive"),
        ({"q_segment_ids": (1, 64)}, "go together"),
        ({"q_segment_ids": (1, 64), "kv_segment_ids": (1, 63)}, r"kv_segment_ids must be int32\[1, 64\]"),
        ({"q_scale": (1, 2, 1)}, "q_scale belongs to float8_e4m3fn"),
        ({"dtype": jnp.float8_e4m3fn}, r"float8 needs q_scale as float32\[1, 2, 1\]"),
        ({"implementation": "best"}, "unknown implementation='best'"),
    ],
)
def test_errors(change, message):
    change = dict(change)
    dtype = change.pop("dtype", jnp.bfloat16)
    q, k, v = (jnp.zeros(change.pop(name, (1, 64, 2, 64)), dtype) for name in "qkv")
    options = {
        name: jnp.zeros(x, jnp.int32 if "segment" in name else jnp.float32) if isinstance(x, tuple) else x
        for name, x in change.items()
    }
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, v, **options)


def test_mixed_dtypes():
    q, k = jnp.zeros((1, 4, 2, 8), jnp.bfloat16), jnp.zeros((1, 4, 2, 8), jnp.float32)
    with pytest.raises(ValueError, match="one dtype, q has bfloat16 and k has float32"):
        flash_attention(q, k, k)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS[::3], ids=lambda spec: spec.name)
def test_specs_lower(spec):
    lower(functools.partial(spec.function, implementation="xla"), *jax.eval_shape(spec.arguments), target="a100")


def test_the_oracle_agrees_with_finite_differences():
    arrays = make(Case(5, 7, num_heads=2, head_dim=3, sliding_window=4, soft_cap=2.0, segments=((2, 3), (3, 4))))
    *_, dq, dk, dv = expected(arrays)
    for name, gradient in (("q", dq), ("k", dk), ("v", dv)):
        x, index, step = getattr(arrays, name), (0, 4, 0, 1), 1e-2
        losses = []
        for sign in (1, -1):
            out, lse, *_ = expected(dataclasses.replace(arrays, **{name: x.at[index].add(sign * step)}))
            losses.append(np.sum(out * np.asarray(arrays.d_out)) + np.sum(lse * np.asarray(arrays.d_lse)))
        np.testing.assert_allclose((losses[0] - losses[1]) / (2 * step), gradient[index], rtol=1e-2, atol=1e-3)


def test_memory_is_linear_in_the_length():
    q, ids = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.float32), jax.ShapeDtypeStruct((1, 4096), jnp.int32)

    def attend(q, ids):
        return flash_attention(q, q, q, q_segment_ids=ids, kv_segment_ids=ids, implementation="xla")

    # The mask alone would be 16 MiB.
    assert jax.jit(attend).lower(q, ids).compile().memory_analysis().temp_size_in_bytes < 8 * 2**20
