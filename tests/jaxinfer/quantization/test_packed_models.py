"""Models with packed weights: what stays packed, that nothing else changes, and what is refused."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from checkpoints.gguf_io import GGUFFile
from checkpoints.load import Target
from checkpoints.trees import flatten
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.generation import generate
from jaxinfer.llm import LLM
from jaxinfer.loading import load
from jaxinfer.model.params import abstract_params
from jaxinfer.quantization import is_packed, layouts, packing
from jaxinfer.quantization.layouts import KEPT_TYPES, Layout, current_layout, planes
from jaxinfer.quantization.packing import packed_plan
from jaxinfer.sampling.params import SamplingParams
from pallas_kernels.cpu import library
from pallas_kernels.quantized_matmul import (
    CpuWeight,
    QuantizedWeight,
    dequantize_cpu_weight,
    dequantize_weight,
    repack_gguf,
)
from sharding import make_mesh
from tests.helpers import PagedRow
from tests.jaxinfer.conftest import MAX_LEN
from tests.jaxinfer.engine.test_equality import BASE, check_equal
from tests.naive import NaiveLoop

MODEL = Path("tests/golden/models/tiny-chat")
TOKENS = np.load(MODEL / "golden.npz")["token_ids"]


def logits(model):
    return PagedRow(model.decoder, model.params).feed(TOKENS)


def cosines(a, b):
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def matrices(model):
    return {path: leaf for path, leaf in flatten(model.params).items() if leaf.ndim == 2}


@pytest.fixture(scope="module")
def expanded():
    return load(MODEL / "model.gguf", quantize="none")


@pytest.fixture(params=list(Layout), ids=lambda layout: layout.name.lower())
def layout(request, monkeypatch):
    monkeypatch.setattr(packing, "current_layout", lambda: request.param)
    return request.param


def test_the_cpu_layout_is_the_choice_here():
    assert current_layout() is Layout.CPU


def test_a_gguf_file_stays_packed(expanded, layout):
    model = load(MODEL / "model.gguf")
    kind = CpuWeight if layout is Layout.CPU else QuantizedWeight
    packed = {path for path, leaf in flatten(model.params).items() if isinstance(leaf, kind)}
    assert packed == {path for path, leaf in flatten(expanded.params).items() if leaf.ndim == 2}
    assert model.decoder.activations is None
    np.testing.assert_allclose(logits(model), logits(expanded), atol=2e-4)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    scales_in_f32 = 1.0 if layout is Layout.CPU else 36 / 34
    with GGUFFile(MODEL / "model.gguf") as file:
        assert stored < 1.15 * scales_in_f32 * sum(file.read_packed(name)[0].nbytes for name in file.names())


@pytest.mark.parametrize(("activations", "least", "most"), [("int16", 1e-5, 1e-3), ("int8", 3e-3, 0.3)])
def test_rounded_activations(expanded, layout, activations, least, most):
    if layout is Layout.PLANES and activations == "int16":
        with pytest.raises(
            ValueError, match='"int16" is for the C\\+\\+ kernels of CPUs; use "int8" or "float32" here'
        ):
            load(MODEL / "model.gguf", activations=activations)
        return
    model = load(MODEL / "model.gguf", activations=activations)
    assert model.decoder.activations == activations
    wanted = logits(expanded)
    assert least < np.abs(logits(model) - wanted).max() / np.abs(wanted).max() < most


def test_activations_stay_as_they_are_unless_asked(layout):
    for activations in (None, "float32"):
        assert load(MODEL / "model.gguf", activations=activations).decoder.activations is None


@pytest.mark.parametrize(("quantize", "steps"), [("int8", 127), ("int4", 15)])
def test_any_model_can_be_packed(quantize, steps, layout, tmp_path):
    plain, packed = load(MODEL), load(MODEL, quantize=quantize)
    expand = dequantize_cpu_weight if layout is Layout.CPU else dequantize_weight
    rounded = jax.tree.map(lambda leaf: expand(leaf) if is_packed(leaf) else leaf, packed.params, is_leaf=is_packed)
    for path, matrix in matrices(plain).items():
        groups = np.asarray(matrix).reshape(len(matrix), -1, 32 if quantize == "int4" else 64)
        size = np.abs(groups).max(-1) if quantize == "int8" else np.ptp(groups, axis=-1)
        error = np.abs(np.asarray(flatten(rounded)[path]).reshape(groups.shape) - groups).max(-1)
        assert (error < 0.51 * size / steps + 1e-3 * np.abs(groups).max(-1)).all(), path  # scales have 11 bits
    np.testing.assert_allclose(logits(packed), logits(dataclasses.replace(plain, params=rounded)), atol=2e-4)
    if layout is Layout.CPU:
        plain.save(tmp_path / "saved")
        again = load(tmp_path / "saved", quantize=quantize)
        jax.tree.map(np.testing.assert_array_equal, again.params, packed.params)


def test_without_being_asked_only_packed_files_are_packed():
    assert not any(is_packed(leaf) for leaf in jax.tree.leaves(load(MODEL).params, is_leaf=is_packed))
    on_a_mesh = load(MODEL / "model.gguf", mesh=make_mesh(model=2))
    assert not any(is_packed(leaf) for leaf in jax.tree.leaves(on_a_mesh.params, is_leaf=is_packed))


@pytest.mark.slow
def test_the_engine_gives_the_tokens_of_the_naive_loop():
    """Chunks, batches and preemption change nothing."""
    model = load(MODEL / "model.gguf")
    engine = Engine(model, EngineConfig(**BASE | {"page_size": 4, "num_pages": 1 + MAX_LEN // 4}))
    check_equal(engine, NaiveLoop(model, MAX_LEN), num_requests=6, seed=0)


@pytest.mark.slow
def test_generate_is_pure_with_packed_weights():
    model = load(MODEL / "model.gguf")
    tokens = np.asarray(TOKENS[None, :5], np.int32)
    once = jax.jit(lambda params, tokens: generate(model.decoder, params, tokens, max_new_tokens=6))
    plain = once(model.params, tokens)
    batched = jax.vmap(lambda tokens: once(model.params, tokens))(np.stack([tokens, tokens]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b), batched, plain)


@pytest.mark.parametrize("stored", KEPT_TYPES)
def test_planes_hold_the_same_matrix(stored, rng):
    kind = gguf.GGMLQuantizationType[stored]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (11, 512 // block_size, block_bytes), np.uint8)
    halves = {"Q6_K": [208]}.get(stored, [0] if stored in ("Q8_0", "Q4_0", "Q5_0") else [0, 2])
    for at in halves:
        scales = rng.normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    blocks[3, 0, halves[0] : halves[0] + 2] = 0  # a scale of 0 leaves the offset alone
    weight = repack_gguf(blocks.reshape(11, -1), stored)
    again = planes(weight)
    wanted = np.asarray(dequantize_cpu_weight(weight))
    np.testing.assert_allclose(dequantize_weight(again), wanted, atol=1e-6 * np.abs(wanted).max(), rtol=2e-6)


class Stub:
    """As much of a GGUFFile as the plan needs."""

    def names(self):
        return list(self.specs)

    def __init__(self, types, inputs=64):
        self.specs = {name: dataclasses.make_dataclass("Spec", ["shape", "dtype"])((8, inputs), t) for name, t in types}
        self.spec = self.specs.__getitem__

    def is_packed(self, name):
        return self.spec(name).dtype not in ("F32", "F16")


def test_what_no_kernel_reads_is_converted_and_said(monkeypatch, caplog):
    monkeypatch.setattr(packing, "GGUFFile", Stub)
    source = Stub([("a", "IQ4_NL"), ("b", "F16"), ("c", "Q4_K"), ("d", "IQ4_NL")])
    plan = {name: Target(name) for name in "abcd"}
    abstract = {name: jax.ShapeDtypeStruct((8, 64), np.float32) for name in "abcd"}
    with caplog.at_level(logging.WARNING):
        made = packed_plan(plan, source, abstract, None)
    assert "no kernel reads the types of 2 IQ4_NL tensors: kept in 8 bits" in caplog.text
    assert made["b"] == plan["b"]
    assert made["c"].raw
    assert not made["a"].raw
    weight = made["a"].pack(np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64))
    assert (weight.bits, weight.group) == (8, 32)
    caplog.clear()
    odd = {name: jax.ShapeDtypeStruct((8, 40), np.float32) for name in "abcd"}
    assert packed_plan(plan, Stub([(n, "Q8_0") for n in "abcd"], 40), odd, None) == plan
    assert "not packed, as the inputs are no multiple of 32: 4 Q8_0 tensors" in caplog.text


def test_without_kernels_a_cpu_expands_what_is_packed(monkeypatch, caplog, expanded):
    monkeypatch.setattr(layouts, "has_cpu_kernels", lambda: False)
    with caplog.at_level(logging.WARNING):
        model = load(MODEL / "model.gguf")
    assert "packed weights are expanded: without C++ kernels" in caplog.text
    jax.tree.map(np.testing.assert_array_equal, model.params, expanded.params)
    asked = load(MODEL / "model.gguf", quantize="int8")
    assert isinstance(asked.params["embed"]["weight"], QuantizedWeight)


def test_shapes_need_no_kernels(monkeypatch, expanded):
    """Compile checks run where none can be built."""

    def must_not_be_asked(isa):
        raise AssertionError("the C++ kernels were asked for")

    monkeypatch.setattr(library, "load_library", must_not_be_asked)
    config = dataclasses.replace(expanded.config, intermediate_size=96)
    assert abstract_params(config, np.float32)[0]["layers_0"]["mlp"]["up"]["weight"].shape == (96, 64)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="quantize must be one of none, int8, int4 or None, got 'int3'"):
        load(MODEL, quantize="int3")
    with pytest.raises(ValueError, match="activations must be one of float32, int16, int8 or None, got 'int4'"):
        load(MODEL, activations="int4")
    for where in (MODEL, MODEL / "model.gguf"):
        with pytest.raises(ValueError, match="goes with packed weights, and none are"):
            load(where, activations="int8", quantize="none")
    with pytest.raises(ValueError, match="packs weights for one device so far"):
        load(MODEL, quantize="int8", mesh=make_mesh(model=2))
    with pytest.raises(ValueError, match='load the model with quantize="none"'):
        load(MODEL / "model.gguf").save(tmp_path / "saved")


ONE_THREAD = """
import os, sys
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # XLA makes a thread for each CPU that the process may use
from tests.jaxinfer.quantization.test_packed_models import greedy_tokens
print(greedy_tokens(sys.argv[1]))
"""


def greedy_tokens(activations):
    llm = LLM(MODEL / "model.gguf", activations=activations, max_num_seqs=1, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    return llm.generate(list(range(5, 25)), params)[0].outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not let a process choose its CPUs")
@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
def test_one_thread_gives_the_same_tokens(activations):
    command = [sys.executable, "-c", ONE_THREAD, activations]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(greedy_tokens(activations)), done.stderr
