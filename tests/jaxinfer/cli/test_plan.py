"""`jaxinfer plan`: figures of known models, and that they are those of an engine."""

import json

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.sizes import format_size, parse_size
from jaxinfer.compile_check.model_shapes import MODEL_SHAPES
from jaxinfer.config import EngineConfig
from jaxinfer.engine import engine as engine_module
from jaxinfer.engine.engine import Engine
from jaxinfer.quantization.layouts import has_cpu_kernels

TINY = "tests/golden/models/tiny-chat"
KiB, GiB = 1 << 10, 1 << 30
LLAMA_2_70B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def plan(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("model", "kv_dtype", "size"),
    [
        ("llama-2-7b", "auto", 512 * KiB),
        ("llama-2-70b", "auto", 320 * KiB),
        ("llama-3-8b", "auto", 128 * KiB),
        ("llama-3-8b", "int8", 66 * KiB),  # an f32 scale for 128 values
        ("llama-3-8b", "int4", 38 * KiB),  # in pages of 64: KIVI's 32 KiB, and scales and zeros
    ],
)
def test_bytes_per_token(model, kv_dtype, size):
    found = plan(model, "--memory", "1TB", "--kv", kv_dtype)
    assert found["bytes_per_token"] == size
    assert found["kv_pages"] == found["num_pages"] * found["page_size"] * size
    parts = sum(found[name] for name in ("weights", "workspace", "open_pages", "kv_pages", "left"))
    assert parts == found["memory"] == 10**12
    assert found["weights"] == 2 * MODEL_SHAPES[model].num_parameters


def test_a_config_json_is_enough(tmp_path):
    """Llama-2-70B; with a KV head for each of its 64 heads a token would take 2.5 MiB."""
    path = tmp_path / "config.json"
    for heads, size in ((8, 320 * KiB), (64, 2560 * KiB)):
        path.write_text(json.dumps(LLAMA_2_70B | {"num_key_value_heads": heads}))
        for where in (path, tmp_path):
            assert plan(where, "--memory", "400GB")["bytes_per_token"] == size


def test_requests_that_fit():
    options = ["llama-3-8b", "--memory", "80GiB", "--memory-fraction", 1, "--max-model-len", 8192]
    found = plan(*options, "--length", 1000, "--max-num-seqs", 1000, "--max-tokens", 1000)
    pages = (80 * GiB - found["weights"] - found["workspace"]) // (16 * 128 * KiB)
    assert found["num_pages"] == pages
    assert found["num_tokens"] == 16 * (pages - 1)
    assert found["num_requests"] == (pages - 1) // 63
    assert plan(*options, "--length", 1000)["num_requests"] == 64  # slots
    text = run(*options).stdout
    assert "tokens              524,288, all that --max-num-seqs requests can use" in text
    assert "requests at once    64 of 8,192 tokens" in text


@pytest.mark.skipif(not has_cpu_kernels(), reason="weights lie in another layout without the C++ kernels")
@pytest.mark.parametrize("kv_dtype", ["auto", "int4"])
def test_an_engine_does_what_was_planned(model, monkeypatch, kv_dtype):
    memory = 6 << 20
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    monkeypatch.setattr(engine_module, "free_memory", lambda _: memory - weights)
    found = plan(TINY, "--memory", memory, "--cpu", "--kv", kv_dtype, "--max-num-seqs", 3, "--max-tokens", 32)
    config = EngineConfig(kv_dtype=kv_dtype, page_size=found["page_size"], max_num_seqs=3, max_num_batched_tokens=32)
    engine = Engine(model, config)
    assert found["weights"] == weights
    assert (found["num_pages"], found["max_model_len"]) == (engine.scheduler.pool.num_pages, engine.max_model_len)
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.state.cache))
    assert found["kv_pages"] + found["open_pages"] == cache
    assert found["bytes_per_token"] == engine.stats().kv_bytes_per_token
    assert jnp.dtype(model.spec.dtype) == jnp.float32  # what --cpu takes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["llama-2-70b", "--memory", "80GB"],
            r"the weights do not fit: they take 128.48 GiB and the memory is 74.51 GiB, 53.97 GiB too little even "
            r"without a KV cache\nit would fit into 128.7 GiB; or use --quantize int8 or --quantize int4",
        ),
        (
            ["llama-2-7b", "--memory", "16GB", "--max-model-len", 4096],
            r"the KV cache is too small for one request.*\nit would fit into 16.\d GiB; or use --kv int8 or --quantize",
        ),
        (["llama-2-7b", "--memory", "16GB", "--max-model-len", 5000], r"max_model_len=5000 is more than the model's"),
        (["llama-2-7b", "--memory", "80GB", "--length", 5000], r"length must be between 1 and the longest request of"),
        (["llama-9", "--memory", "80GB"], r"no model 'llama-9'[^\0]*shapes without weights: llama-2-7b"),
        (["llama-2-7b", "--memory", "lots"], r"memory must be a number with a unit such as 24GB or 16GiB, got 'lots'"),
    ],
    ids=["weights", "one request", "too long for the model", "length", "unknown", "no size"],
)
def test_refusals_say_what_would_fit(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    with pytest.raises(ValueError, match=message):
        raise result.exception


def test_what_is_said_to_fit_fits():
    options = ["llama-2-7b", "--max-model-len", 4096, "--memory"]
    error = str(run(*options, "16GB").exception)
    least = error.split("fit into ")[1].split(";")[0]
    size = parse_size(least)
    assert run(*options, size + GiB // 10).exit_code == 0
    assert run(*options, size - GiB // 10).exit_code == 1


def test_sizes():
    assert [parse_size(text) for text in ("80GB", "24 GiB", "1.5mib", "1000")] == [
        80 * 10**9, 24 * GiB, 3 << 19, 1000,
    ]  # fmt: skip
    for text in ("", "GB", "-1GB", "1e30GB", "12 lots"):
        with pytest.raises(ValueError, match="host_memory must be a number with a unit"):
            parse_size(text, "host_memory")
    assert [format_size(size) for size in (5, 2048, 3 << 20, GiB)] == ["5 B", "2.0 KiB", "3.0 MiB", "1.0 GiB"]
