import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.memory import CPU_CACHE_LIMIT, free_memory, plan_pages, workspace_bytes
from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.kv_cache import KVCache

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def model(layers=32, heads=32, kv_heads=32, head_dim=128, length=4096, vocab=32000, hidden=4096, mlp=11008):
    return ModelConfig("llama", vocab, hidden, mlp, layers, heads, kv_heads, head_dim, length, 1e-5, 10000.0)


BF16 = KVSpec("bfloat16", "bfloat16")
LLAMA2_7B = model()
LLAMA2_70B = model(layers=80, heads=64, kv_heads=8, hidden=8192, mlp=28672)
LLAMA3_8B = model(kv_heads=8, length=8192, vocab=128256, mlp=14336)


@pytest.mark.parametrize(
    ("config", "kv_dtype", "size"),
    [
        (LLAMA2_7B, "bfloat16", 512 * KiB),
        (LLAMA2_70B, "float16", 320 * KiB),
        (LLAMA3_8B, "bfloat16", 128 * KiB),
        (LLAMA3_8B, "float32", 256 * KiB),
        (LLAMA3_8B, "int8", 66 * KiB),  # an f32 scale for 128 values
        (LLAMA3_8B, "int8,bfloat16", 97 * KiB),
        (LLAMA3_8B, "float32,float8", 161 * KiB),
        (LLAMA3_8B, "int4", 38 * KiB),  # of 64 tokens: a scale and a zero for 64 keys, and for 128 values
        (LLAMA3_8B, "int4,int2", 30 * KiB),
    ],
)
def test_bytes_per_token_are_those_of_the_arrays(config, kv_dtype, size):
    kv = KVSpec.parse(kv_dtype, "float32")
    page = kv.page_size
    assert kv.bytes_per_token(config) == size
    assert kv.page_bytes(config, page) == page * size
    cache = jax.eval_shape(lambda: KVCache.init(config, 5, page, kv, num_slots=3))
    allocated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert allocated == 5 * page * size + 4 * kv.open_bytes(config, page)


def test_kv_dtype_is_read_as_it_is_written():
    assert KVSpec.parse("auto", "bfloat16") == KVSpec("bfloat16", "bfloat16")
    assert KVSpec.parse("int8, auto", jnp.dtype(jnp.float32)) == KVSpec("int8", "float32")
    assert [str(KVSpec.parse(text, "float32")) for text in ("int8", "float8,bfloat16")] == ["int8", "float8,bfloat16"]


def test_open_pages_are_counted_and_need_whole_groups():
    config = EngineConfig(kv_dtype="int4", page_size=64, max_num_seqs=3)
    kv = config.kv_spec("bfloat16")
    assert kv.open_bytes(LLAMA3_8B, 64) == 64 * BF16.bytes_per_token(LLAMA3_8B)
    free = workspace_bytes(LLAMA3_8B, config) + GiB // 2
    num_pages, _ = plan_pages(LLAMA3_8B, dataclasses.replace(config, memory_fraction=1), kv, free, False)
    assert num_pages == (GiB // 2 - 4 * kv.open_bytes(LLAMA3_8B, 64)) // (64 * 38 * KiB)
    with pytest.raises(ValueError, match="page_size must be a multiple of 32, such as 64, got 16"):
        EngineConfig(kv_dtype="int8,int2")


@pytest.mark.parametrize("kv_dtype", ["int3", "int8,", "int8,int8,int8", "", None])
def test_an_unknown_kv_dtype_is_refused(kv_dtype):
    with pytest.raises(ValueError, match=r'kv_dtype must be "auto", one of float32, .* as "K,V", got'):
        EngineConfig(kv_dtype=kv_dtype)


def test_workspace():
    """Per token 2 F + 4 D + 2 N H float32, and four times the float32 logits of all rows."""
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256)
    widest = 2 * 14336 + 4 * 4096 + 2 * 32 * 128
    assert workspace_bytes(LLAMA3_8B, config) == 256 * widest * 4 + 4 * 8 * 128256 * 4


def test_pages_fill_the_fraction_of_free_memory():
    config = EngineConfig(memory_fraction=0.9)
    workspace = workspace_bytes(LLAMA3_8B, config)
    num_pages, length = plan_pages(LLAMA3_8B, config, BF16, free=workspace + 10 * GiB, is_cpu=False)
    assert num_pages == 9 * GiB // (16 * 128 * KiB) == 4608
    assert length == 8192


def test_never_more_pages_than_all_rows_at_full_length_could_use():
    config = EngineConfig(max_num_seqs=2, max_model_len=100)
    assert plan_pages(LLAMA3_8B, config, BF16, 100 * GiB, False) == (1 + 2 * 7, 100)


def test_a_cpu_takes_no_more_than_its_limit():
    num_pages, _ = plan_pages(LLAMA3_8B, EngineConfig(), BF16, 100 * GiB, True)
    assert num_pages == CPU_CACHE_LIMIT // (2 * MiB) == 512


def test_without_max_model_len_the_pages_bound_the_length():
    workspace = workspace_bytes(LLAMA3_8B, EngineConfig())
    num_pages, length = plan_pages(LLAMA3_8B, EngineConfig(memory_fraction=1), BF16, workspace + 20 * MiB, False)
    assert (num_pages, length) == (10, 9 * 16)


def test_num_pages_is_taken_as_given():
    assert plan_pages(LLAMA3_8B, EngineConfig(num_pages=5), BF16, 0, False) == (5, 64)
    assert plan_pages(LLAMA3_8B, EngineConfig(num_pages=9999), BF16, 0, False) == (9999, 8192)


@pytest.mark.parametrize(
    ("options", "free", "message"),
    [
        ({"max_model_len": 8193}, GiB, "max_model_len=8193 is more than the model's 8192 tokens"),
        ({"num_pages": 5, "max_model_len": 65}, GiB, "5 pages hold 64 tokens, .* 65, which needs 6 pages; raise"),
        ({"num_pages": 2, "page_size": 1}, GiB, "2 pages hold 1 tokens, .* at least 2"),
        ({}, 100 * MiB, "100 MiB are free, one page of 16 tokens takes 2.0 MiB .* lower max_num_batched_tokens"),
    ],
    ids=["above the model's", "too small for one request", "no request at all", "no room"],
)
def test_refusals(options, free, message):
    with pytest.raises(ValueError, match=message):
        plan_pages(LLAMA3_8B, EngineConfig(**options), BF16, free, False)


@given(
    free=st.integers(0, 64 * GiB),
    fraction=st.floats(0.01, 1),
    page_size=st.sampled_from([1, 16, 64, 128]),
    seqs=st.integers(1, 300),
    length=st.none() | st.integers(2, 8192),
    is_cpu=st.booleans(),
)
def test_a_plan_fits_and_holds_what_it_promises(free, fraction, page_size, seqs, length, is_cpu):
    config = EngineConfig(
        max_num_seqs=seqs, max_num_batched_tokens=512, page_size=page_size, max_model_len=length,
        memory_fraction=fraction,
    )  # fmt: skip
    page_bytes = page_size * BF16.bytes_per_token(LLAMA3_8B)
    budget = (free - workspace_bytes(LLAMA3_8B, config)) * fraction
    budget = min(budget, CPU_CACHE_LIMIT) if is_cpu else budget
    if (int(budget) // page_bytes - 1) * page_size < (length or 2):
        with pytest.raises(ValueError, match=r"no room|too small"):
            plan_pages(LLAMA3_8B, config, BF16, free, is_cpu)
        return
    num_pages, max_len = plan_pages(LLAMA3_8B, config, BF16, free, is_cpu)
    assert num_pages * page_bytes <= budget
    assert num_pages - 1 <= seqs * -(-(length or 8192) // page_size)
    assert 2 <= max_len <= (num_pages - 1) * page_size
    assert max_len <= 8192
    assert length in (None, max_len)


def test_free_memory_is_what_the_device_says():
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 30})
    assert free_memory(device) == 70


def test_free_memory_of_a_cpu_is_the_hosts():
    assert free_memory(SimpleNamespace(memory_stats=lambda: None)) > MiB
