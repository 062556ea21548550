"""`load` from every format: what comes back, where it is placed, and what the errors say."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxinfer.loading import load
from jaxinfer.sampling.params import SamplingParams
from sharding import AxisRules, make_mesh
from tests.helpers import PagedRow

MODEL = Path("tests/golden/models/tiny-chat")
CHAT = json.loads((MODEL / "chat.json").read_text())
RECOMMENDED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def model():
    return load(MODEL, dtype="float32")


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def greedy(model, tokens, count=6):
    row = PagedRow(model.decoder, model.params)
    logits, out = row.feed(tokens), []
    for _ in range(count):
        out.append(int(logits[-1].argmax()))
        logits = row.feed(out[-1:])
    return out


def change_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("name", [".", "model.gguf"])
def test_every_part_of_a_model(name):
    seen = []
    model = load(MODEL / name, quantize="none", load_progress=lambda done, total: seen.append((done, total)))
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {np.dtype("float32")}  # on CPU
    assert model.decoder.dtype == jnp.float32
    assert sum(leaf.size for leaf in jax.tree.leaves(model.params)) == model.config.num_parameters
    assert seen[-1] == (4 * model.config.num_parameters,) * 2
    assert seen == sorted(seen)
    for chat in CHAT:
        text = model.tokenizer.apply_chat_template(chat["messages"])
        assert text == chat["text"]
        assert model.tokenizer.encode(text, add_special_tokens=False) == chat["token_ids"]


def test_bfloat16(model):
    half = load(MODEL, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype(jnp.bfloat16)}
    golden = np.load(MODEL / "golden.npz")
    logits = PagedRow(half.decoder, half.params).feed(golden["token_ids"])
    assert logits.dtype == np.float32
    error = np.abs(logits - golden["logits"])
    assert 1e-4 < error.max() < 0.5
    assert error.mean() < 0.05
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16 or None, got 'int8'"):
        load(MODEL, dtype="int8")


def test_what_the_authors_recommend(directory, model):
    assert model.default_sampling_params == SamplingParams()
    (directory / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    wanted = SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1)
    assert load(directory).default_sampling_params == wanted
    (directory / "generation_config.json").write_text(json.dumps(RECOMMENDED | {"do_sample": False}))
    assert load(directory).default_sampling_params == dataclasses.replace(wanted, temperature=0.0)
    (directory / "generation_config.json").write_text(json.dumps({"temperature": -1}))
    with pytest.raises(ValueError, match="temperature must be"):
        load(directory)
    (directory / "generation_config.json").unlink()
    assert load(directory).default_sampling_params == SamplingParams()


def test_save_and_load(directory, tmp_path):
    """A model with every option that has to survive: NoPE, windows, factors, bfloat16 and defaults."""
    (directory / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    config = json.loads((directory / "config.json").read_text())
    scaling = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
    options = {"model_type": "smollm3", "no_rope_layers": [1, 0], "sliding_window": 5, "use_sliding_window": True}
    options |= {"rope_parameters": scaling, "layer_types": ["sliding_attention", "full_attention"]}
    (directory / "config.json").write_text(json.dumps(config | options))
    model = load(directory, dtype="bfloat16")
    model.save(tmp_path / "saved")
    seen = []
    again = load(tmp_path / "saved", dtype="bfloat16", load_progress=lambda *counts: seen.append(counts))
    assert again.config == model.config
    assert again.decoder == model.decoder
    assert again.default_sampling_params == model.default_sampling_params
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert seen == [(2 * model.config.num_parameters,) * 2]
    for chat in CHAT:
        text = again.tokenizer.apply_chat_template(chat["messages"])
        assert text == chat["text"]
        assert again.tokenizer.encode(text, add_special_tokens=False) == chat["token_ids"]
    assert again.tokenizer.eos_token_ids == model.tokenizer.eos_token_ids
    with pytest.raises(ValueError, match="exists already"):
        model.save(tmp_path / "saved")


def test_a_saved_gguf_model_answers_the_same(tmp_path):
    model, golden = load(MODEL / "model.gguf", quantize="none"), np.load(MODEL / "golden_gguf.npz")
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved", dtype="float32", mesh=make_mesh(model=2))
    tokens = CHAT[0]["token_ids"]
    assert again.tokenizer.encode(CHAT[0]["text"], add_special_tokens=False) == tokens == golden["token_ids"].tolist()
    assert again.tokenizer.apply_chat_template(CHAT[0]["messages"]) == CHAT[0]["text"]
    assert again.params["embed"]["weight"].sharding.spec == PartitionSpec("model", None)
    assert greedy(again, tokens) == golden["greedy"][:6].tolist()


def test_a_mesh_places_every_leaf_as_ruled():
    mesh = make_mesh(data=2, model=2)
    params = load(MODEL, mesh=mesh).params

    def shards(*path):
        leaf = params
        for name in path:
            leaf = leaf[name]
        assert leaf.sharding.device_set == set(mesh.devices.flat)
        return leaf.shape, {shard.data.shape for shard in leaf.addressable_shards}

    assert shards("embed", "weight") == ((320, 64), {(160, 64)})
    assert shards("layers_1", "attention", "q", "weight") == ((64, 64), {(32, 64)})
    assert shards("layers_1", "attention", "k", "weight") == ((32, 64), {(16, 64)})
    assert shards("layers_0", "attention", "o", "weight") == ((64, 64), {(64, 32)})
    assert shards("layers_0", "mlp", "down", "weight") == ((64, 64), {(64, 32)})
    assert shards("final_norm", "scale") == ((64,), {(64,)})


def test_other_rules_and_what_does_not_divide():
    params = load(MODEL, mesh=make_mesh(data=2, model=2), rules=AxisRules(embed="data")).params
    assert {shard.data.shape for shard in params["embed"]["weight"].addressable_shards} == {(160, 32)}
    assert {shard.data.shape for shard in params["final_norm"]["scale"].addressable_shards} == {(32,)}
    with pytest.raises(ValueError, match=r"has size \d+, which does not divide by the 3 devices"):
        load(MODEL, mesh=make_mesh(model=3))
    with pytest.raises(ValueError, match="two dimensions of"):
        load(MODEL, mesh=make_mesh(model=2), rules=AxisRules(embed="model"))


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), rf"model does not fit the model:\n.*the source lacks: {Q}"),
        (lambda t: t.update({Q: t[Q][:32]}), rf"{Q} -> layers_1/attention/q/weight: wanted \[64, 64\], got \[32, 64\]"),
        (lambda t: t.update(extra=t[Q]), "tensors that the plan does not name.*extra"),
        (
            lambda t: t.update({Q: t[Q].astype(np.int32)}),
            f"{Q} -> layers_1/attention/q/weight: wanted float32, got int",
        ),
    ],
    ids=["missing", "shape", "extra", "integers"],
)
def test_tensors_that_do_not_fit(directory, change, message):
    change_tensors(directory, change)
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_a_tied_head_may_be_stored_and_rotary_tables_are_ignored(directory):
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    more = {"lm_head.weight": np.zeros((320, 64), np.float32)}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    change_tensors(directory, lambda t: t.update(more))
    assert "lm_head" not in load(directory).params


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(ValueError, match=f"(no|wanted) {name}"):
        load(directory)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_invalid_json_is_named(directory, name, text):
    (directory / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        load(directory)


def test_damaged_files(directory):
    for name in ("model.gguf", "model.safetensors"):
        path = directory / name
        path.write_bytes(path.read_bytes()[:-5000])
        with pytest.raises(ValueError, match=name):
            load(path if name == "model.gguf" else directory)


def test_damaged_description_of_a_saved_model(tmp_path, model):
    model.save(tmp_path / "saved")
    file = tmp_path / "saved" / "jaxinfer.json"
    content = json.loads(file.read_text())
    for change in ({}, {"model": {"family": "llama"}, "sampling": {}}):
        file.write_text(json.dumps(content | {"config": change}))
        with pytest.raises(ValueError, match=r"saved: jaxinfer.json does not describe a model.*save the model again"):
            load(tmp_path / "saved")


def test_unknown_names(directory):
    with pytest.raises(ValueError, match="no model 'smollm4': wanted an existing GGUF file or model directory"):
        load("smollm4")
    with pytest.raises(ValueError, match=r"is a weight file alone; give the directory"):
        load(directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json"):
        load(directory / "config.json")
