"""`jaxinfer bench` on the tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.bench import contestants, modes
from jaxinfer.cli import main

FAKE = Path(__file__).parents[1] / "bench" / "fake_peer.py"
TINY = "tests/golden/models/tiny-chat"


@pytest.fixture
def call(capfd):
    """Runs the command line in this process; returns exit code, standard output and standard error."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return stop.value.code, *capfd.readouterr()

    return call


def test_accuracy_compares_every_mode_on_text_and_golden_prompts(call, llm, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(modes, "make_llm", lambda model, options: made.append(options) or llm)
    text, golden, out = tmp_path / "text", tmp_path / "golden.npz", tmp_path / "out.json"
    text.write_text("The quick brown fox. " * 20)
    np.savez(golden, p0_ids=np.arange(5, 15), p0_greedy64=np.arange(20, 40))
    code, stdout, _ = call(
        "bench", "accuracy", "-m", TINY, "--text", text, "--window", 48, "--max-tokens", 96, "--golden", golden,
        "--mode", "", "--mode", "activations=int8", "--json", out,
    )  # fmt: skip
    assert code == 0
    assert [{k: v for k, v in options.items() if k != "max_num_seqs"} for options in made] == [
        {"quantize": "none", "dtype": "float32"}, {}, {"activations": "int8"},
    ]  # fmt: skip
    assert "text: 94 positions" in stdout
    assert "golden prompts: 20 positions" in stdout
    results = json.loads(out.read_text())["accuracy"]["results"]
    assert results["text"]["activations=int8"]["top1"] == 1  # it is the same engine


def test_accuracy_refuses_a_wrong_mode_before_anything_is_loaded(call):
    code, _, stderr = call("bench", "accuracy", "-m", TINY, "--mode", "quant=int8")
    assert code == 2
    assert "a mode is name=value" in stderr


@pytest.fixture
def contest(tmp_path, monkeypatch, llm):
    """A workload file, and a peer that is no engine; our model is loaded already."""
    monkeypatch.setattr(modes, "make_llm", lambda model, options: llm)
    monkeypatch.setenv("PYTHONPATH", str(contestants.RUNNERS))
    monkeypatch.setattr(contestants, "PEERS", {"vllm": str(FAKE)})
    requests = [{"prompt": [5, 6, 7 + i], "n_out": 6} for i in range(8)]
    path = tmp_path / "workloads.json"
    path.write_text(json.dumps({"models": {"tiny": {"W1": {"requests": requests}, "W6": {"requests": requests}}}}))
    return ["-m", TINY, "--workloads", path, "--peer", "vllm", "--peer-python", sys.executable, "--repeats", 2]


@pytest.mark.parametrize(("command", "workload", "phase"), [("latency", "W1", "prefill"), ("throughput", "W6x8", None)])
def test_speed_is_compared_with_a_peer(call, contest, tmp_path, monkeypatch, command, workload, phase):
    out = tmp_path / "out.json"
    code, stdout, stderr = call("bench", command, *contest, "--only", workload, "--json", out)
    assert code == 0, stderr
    assert f"{workload} 2/2 vllm: 0.006 s" in stderr
    assert f"| {workload}: jaxinfer over vllm |" in stdout
    assert "GB/s read" in stdout
    assert "vllm: engine fake 1.0" in stdout
    assert (f"| {workload} prefill: jaxinfer |" in stdout) == (phase == "prefill")
    document = json.loads(out.read_text())
    assert document["results"][workload]["vllm"]["output_tokens"] == (6 if command == "latency" else 48)
    assert len(document["runs"][workload]["jaxinfer"]) == 2


def test_a_peer_that_cannot_start_ends_the_command(call, contest):
    code, _, stderr = call("bench", "latency", *contest, "--only", "W1", "--peer-model", broken(contest))
    assert code == 1
    assert "vllm failed with code 1" in stderr
    assert "the model is broken" in stderr
    code, _, stderr = call("bench", "latency", *contest, "--only", "W1", "--peer-python", "python")
    assert code == 2
    assert "--peer-python is given 2 times for 1 --peer" in stderr


def broken(contest):
    path = contest[3].with_name("broken")
    path.touch()
    return path


@pytest.mark.slow
def test_startup_times_new_processes(call, contest):
    code, stdout, stderr = call("bench", "startup", *contest)
    assert code == 0, stderr
    assert "start to first token s" in stdout
    assert "| jaxinfer |" in stdout
    assert "| vllm |" in stdout


def test_peers_need_the_standard_library_alone():
    code = "import sys, peer_loop; sys.exit(str({'jax', 'numpy', 'jaxinfer'} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], cwd=contestants.RUNNERS, capture_output=True, text=True)
    assert done.stderr.strip() == ""
