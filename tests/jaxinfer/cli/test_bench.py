"""`jaxinfer bench` on the tiny model."""

import json

import numpy as np
import pytest

from jaxinfer.bench import modes
from jaxinfer.cli import main

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
