"""`jaxinfer compile-check`: arithmetic and parsers, cheap lowering always, the compilers where they are installed."""

import dataclasses
import json
import os
import stat
import struct
import sys

import pytest
from click.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.compile_check import TARGETS
from jaxinfer.compile_check import hlo
from jaxinfer.compile_check.cases import compile_cases
from jaxinfer.compile_check.devices import DEVICES, parse_mesh
from jaxinfer.compile_check.launch import run_check
from jaxinfer.compile_check.model_shapes import MODEL_SHAPES
from jaxinfer.compile_check.mosaic_dump import elf_code_bytes, occupancy, read_dump
from jaxinfer.compile_check.plan import Plan, make_plan
from jaxinfer.compile_check.roofline import decode_roofline, prefill_roofline
from jaxinfer.compile_check.steps import fit_pages, weight_bytes_per_device
from jaxinfer.compile_check.topology import has_plugin
from jaxinfer.kv_spec import KVSpec

TINY = "tests/golden/models/tiny-chat"
SMALL = ["--max-num-seqs", "4", "--max-tokens", "16", "--max-model-len", "64", "--num-pages", "17"]
LLAMA = MODEL_SHAPES["llama-3-8b"]


def call(*arguments):
    result = CliRunner().invoke(app, ["compile-check", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow  # CI runs the command itself too
@pytest.mark.parametrize(("target", "kernel_platform"), [("h200", "gpu"), ("v5e", "tpu")])
def test_lower_only_needs_no_plugin(target, kernel_platform):
    found = json.loads(call("--target", target, "-m", TINY, "--layers", 1, "--lower-only", "--json", *SMALL).output)
    assert set(found["steps"]) == {"decode", "prefill"}
    assert (found["steps"]["decode"]["num_tokens"], found["steps"]["prefill"]["num_tokens"]) == (4, 16)
    assert found["num_pages"] == 17
    assert found["roofline"]["decode"]["bound"] == "memory"
    assert DEVICES[target].platform == kernel_platform


@pytest.mark.slow
def test_lower_only_on_a_mesh_says_what_it_is():
    out = call("--target", "h200", "-m", "llama-3-8b", "--layers", 1, "--mesh", "model=8", "--lower-only").output
    assert "8 x NVIDIA H200" in out
    assert "the engine itself does not run on several devices yet" in out
    assert "not measured" in out


@pytest.mark.skipif(has_plugin("gpu") or has_plugin("tpu"), reason="this Python has a compiler plugin")
@pytest.mark.parametrize(
    ("target", "command"), [("h200", "jax-cuda13-plugin=="), pytest.param("v5e", "jax[tpu]==", marks=pytest.mark.slow)]
)
def test_without_a_plugin_the_way_to_get_it_is_told(target, command):
    with pytest.raises(ValueError, match="this Python has no compiler for") as error:
        call("--target", target, "-m", TINY, *SMALL)
    assert command in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "variable"), [("h200", "JAXINFER_CUDA_PYTHON"), ("v5e", "JAXINFER_TPU_PYTHON")])
def test_full_compile(target, variable):
    if not (python := os.environ.get(variable)):
        pytest.skip(f"set {variable} to the Python of an environment with the compiler")
    arguments = ("--target", target, "-m", TINY, "--json", "--python", python, "--dtype", "bfloat16", *SMALL)
    found = json.loads(call(*arguments).output)
    for step in found["steps"].values():
        assert step["memory"]["total"] > found["weight_bytes"] > 0
        assert step["collectives"] == {}
    assert bool(found["steps"]["decode"]["xla_counts"]) == (target == "v5e")


def fake_python(folder, script):
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_compiler_that_aborts_is_explained(tmp_path):
    python = fake_python(tmp_path, "import os, sys\nprint('bad target', file=sys.stderr, flush=True)\nos.abort()")
    with pytest.raises(RuntimeError, match=r"was ended by SIGABRT at the start.*cannot compile for a100") as error:
        run_check(make_plan(LLAMA, "a100"), python)
    assert str(error.value).endswith("bad target")
    with pytest.raises(ValueError, match="there is no Python at /nowhere/python"):
        run_check(make_plan(LLAMA, "a100"), "/nowhere/python")


def test_cases_go_on_after_one_that_aborts(tmp_path):
    script = """
import json, os, sys
request, answer = json.load(open(sys.argv[-3])), []
print("\\0started", file=sys.stderr, flush=True)
for operation, name in request["cases"]:
    if name == "bad":
        print("no such instruction", file=sys.stderr, flush=True)
        os.abort()
    answer.append((operation, name, {"compile_s": 1.0}))
    json.dump(answer, open(sys.argv[-2], "w"))
"""
    told = []
    cases = [("op", "good"), ("op", "bad"), ("op", "last")]
    good, bad, last = compile_cases("h200", "mosaic_gpu", cases, fake_python(tmp_path, script), tell=told.append)
    assert good == last == {"compile_s": 1.0}
    assert "code -6" in bad["error"]
    assert "no such instruction" in bad["error"]
    assert len(told) == 3


def test_plan_survives_its_journey_to_the_other_process():
    plan = make_plan(LLAMA, "v6e", num_devices=4, dtype="float32", context=100, max_num_seqs=3, page_size=32)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.engine.max_model_len == 8192


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "h300"}, "unknown target 'h300'; choose from h200"),
        ({"num_devices": 3}, "3 devices cannot share this model: its 8 KV heads"),
        ({"dtype": "int8"}, "dtype must be one of float32"),
        ({"max_model_len": 10**6}, "is more than the model's 131072 tokens"),
        ({"context": 9000}, "context must be between 1 and max_model_len=8192"),
    ],
)
def test_plans_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(LLAMA, **{"target": "h200"} | options)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"the weights do not fit: 131\.4 GiB a device.*--mesh model=2"):
        fit_pages(make_plan(MODEL_SHAPES["llama-3-70b"], "h200"))


def test_sharing_weights():
    one, eight = (weight_bytes_per_device(make_plan(LLAMA, "h200", num_devices=n)) for n in (1, 8))
    assert one == 2 * LLAMA.num_parameters == 2 * 8_030_261_248
    norms = 2 * (2 * LLAMA.num_layers + 1) * LLAMA.hidden_size
    assert eight == (one - norms) // 8 + norms


def test_roofline_by_hand():
    plan = make_plan(LLAMA, "h200", context=1000, max_num_seqs=2, max_num_batched_tokens=3)
    layer = 4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 14336
    head = 128256 * 4096
    bound = decode_roofline(plan)
    assert bound.flops == 2 * 2 * (32 * layer + head) + 4 * 32 * 128 * 32 * 2 * 1000
    assert bound.num_bytes["weights"] == 2 * (32 * layer + head)
    assert bound.num_bytes["KV read"] == 2 * 1000 * KVSpec("bfloat16", "bfloat16").bytes_per_token(LLAMA)
    assert bound.bound == "memory"
    assert bound.seconds == pytest.approx(sum(bound.num_bytes.values()) / 4.8e12)
    prefill = prefill_roofline(plan)
    assert prefill.flops == 2 * 3 * 32 * layer + 2 * head + 4 * 32 * 128 * 32 * (1 + 2 + 3)
    windowed = dataclasses.replace(LLAMA, layer_windows=(2,) * 32)
    pairs = prefill_roofline(dataclasses.replace(plan, model=windowed)).flops - prefill.flops
    assert pairs == -4 * 32 * 128 * 32
    half = decode_roofline(dataclasses.replace(plan, num_devices=2))
    assert half.flops == bound.flops / 2


def test_mesh_texts():
    assert parse_mesh("") == {"data": 1, "model": 1}
    assert parse_mesh("model=8") == {"data": 1, "model": 8}
    for bad in ("8", "model=", "pipe=2", "model=0"):
        with pytest.raises(ValueError, match="a mesh is written like model=8"):
            parse_mesh(bad)
    with pytest.raises(ValueError, match="nothing in the engine's step is split over the axis 'data'"):
        call("--target", "h200", "-m", "llama-3-8b", "--mesh", "data=2")


def test_devices():
    assert tuple(DEVICES) == TARGETS
    assert DEVICES["v5e"].topology(4) == "v5e:2x2"
    assert DEVICES["h200"].topology(8) == "1x1x8"
    assert "major:10 minor:0 feature_extension:ACCELERATED_FEATURES" in DEVICES["b200"].gpu_target_config()
    with pytest.raises(ValueError, match="more than the 8 GPUs of one machine"):
        DEVICES["h200"].topology(16)
    with pytest.raises(ValueError, match="more than the 16"):
        DEVICES["v5e"].topology(32)


def test_collectives_of_a_program():
    text = """
  %all-reduce.39 = f32[64]{0} all-reduce(%fusion.7), channel_id=1
  %ar = (bf16[2,8]{1,0}, f32[4]{0}) all-reduce-start(%a, %b), channel_id=2
  %ag = (bf16[8,16]{1,0}, bf16[64,16]{1,0}) all-gather-start(%c), channel_id=3
  %done = bf16[64,16]{1,0} all-gather-done(%ag)
  %use = f32[64]{0} add(%all-reduce.39, %all-reduce.39)
"""
    assert hlo.collectives(text) == {
        "all-reduce": {"count": 2, "bytes": 256 + 32 + 16},
        "all-gather": {"count": 1, "bytes": 64 * 16 * 2},
    }


def test_kernels_of_a_program():
    line = (
        '%k = bf16[8]{{0}} custom-call(%q), custom_call_target="tpu_custom_call", metadata={{op_name="jit(model_step)/'
        'layer_{}/attention/pallas_call"}}, backend_config={{"used_scoped_memory_configs":[{{"memory_space":"1",'
        '"offset":"0","size":"4096"}}]}}'
    )
    text = "\n".join([line.format(0), line.format(1), '%s = f32[8]{0} custom-call(%x), custom_call_target="TopK"'])
    assert hlo.kernel_calls(text) == {"attention": 2}
    assert hlo.vmem_bytes(text) == {"attention": 4096}


def test_dump_of_a_kernel(tmp_path):
    (tmp_path / "k_0.ptxas").write_text(
        "ptxas info : Compiling entry function 'k' for 'sm_90a'\n    16 bytes stack frame, 8 bytes spill stores, "
        "12 bytes spill loads\nptxas info    : Used 168 registers, used 2 barriers, 1 bytes smem\n"
    )
    (tmp_path / "k_0.ptx").write_text(".maxntid 384, 1, 1\n")  # no .target: nothing to assemble
    log = tmp_path / "k_0.mlir-passes.log"
    log.write_text("gpu.launch dynamic_shared_memory_size %a {\ngpu.launch dynamic_shared_memory_size %c100048_i32 {\n")
    [kernel] = read_dump(tmp_path, DEVICES["h200"])
    assert (kernel.registers, kernel.spill_stores, kernel.spill_loads, kernel.stack) == (168, 8, 12, 16)
    assert kernel.shared_memory == 100048 + 1
    assert (kernel.threads, kernel.code_bytes) == (384, None)
    assert (kernel.blocks_per_core, kernel.limited_by) == (1, "registers")
    log.write_text("")
    assert read_dump(tmp_path, DEVICES["h200"])[0].shared_memory is None


def test_occupancy():
    h200 = DEVICES["h200"]
    assert occupancy(32, 0, 256, h200) == (8, "registers")
    assert occupancy(16, 0, 1024, h200) == (2, "threads")
    assert occupancy(64, 70000, 128, h200) == (3, "shared memory")
    assert occupancy(16, 0, 32, h200) == (32, "blocks")


def test_code_size_is_that_of_the_text_sections():
    names = b"\0.shstrtab\0.text.kernel\0.data\0"
    sections = [(0, 0, 0), (1, 64, len(names)), (11, 200, 512), (24, 800, 99)]
    offset = 64 + len(names)
    table = b"".join(struct.pack("<IIQQQQIIQQ", n, 0, 0, 0, start, size, 0, 0, 0, 0) for n, start, size in sections)
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, offset)
    struct.pack_into("<HHH", header, 0x3A, 64, len(sections), 1)
    assert elf_code_bytes(bytes(header) + names + table) == 512
