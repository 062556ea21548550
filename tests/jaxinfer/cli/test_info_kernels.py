"""`jaxinfer info --kernels` on operations made for the test."""

import json

import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.kernels import _print_table, kernel_report
from pallas_kernels import registry
from pallas_kernels.dispatch import dispatch
from pallas_kernels.specs import KernelSpec
from pallas_kernels.target import require_hopper, require_tpu


def gpu(x):
    require_hopper(False)
    if x.shape[0] > 4:
        raise NotImplementedError("at most 4 rows")
    return x


def tpu(x):
    require_tpu(False)
    return x


IMPLEMENTATIONS = {"mosaic_gpu": gpu, "mosaic_tpu": tpu, "xla": lambda x: x}


def double(x, implementation=None):
    return dispatch("double", IMPLEMENTATIONS, implementation, x)


SPECS = tuple(KernelSpec(f"rows{n}", double, lambda n=n: (jnp.zeros((n, 2)),), 0.0, 1.0) for n in (2, 8))


@pytest.fixture(autouse=True)
def _one_operation(monkeypatch):
    monkeypatch.setattr(registry, "operations", lambda: ("double",))
    monkeypatch.setattr(registry, "implementations", lambda _: IMPLEMENTATIONS)
    monkeypatch.setattr(registry, "specs", lambda _: SPECS)


def call(*arguments):
    return CliRunner().invoke(app, ["info", *arguments])


def test_lines_in_a_pipe():
    lines = call("--kernels").output.splitlines()
    assert lines[0].startswith("device cpu (cpu), jax ")
    assert [line.split()[:2] for line in lines[1:]] == [["double", name] for name in IMPLEMENTATIONS]
    assert "declined: mosaic_gpu needs a Hopper GPU" in lines[1]
    assert "declined: mosaic_tpu needs a TPU, this is cpu (cpu)" in lines[2]
    assert lines[3].split()[2:] == ["*", "runs", "here"]


def test_another_device_and_a_case_that_is_declined():
    lines = call("--kernels", "--target", "h200").output.splitlines()
    assert "gpu (NVIDIA H200, compute capability 9.0)" in lines[0]
    assert lines[1].split()[2:4] == ["*", "1/2"]
    assert lines[1].endswith("runs 1 of 2 cases; declined rows8: at most 4 rows")
    assert lines[3].split()[2:4] == ["*", "1/2"]
    assert "needs a Hopper GPU" in call("--kernels", "--target", "a100").output.splitlines()[1]


def test_json():
    found = json.loads(call("--kernels", "--json", "--target", "v5e").output)
    assert found["chosen"] == {"double": {"rows2": "mosaic_tpu", "rows8": "mosaic_tpu"}}
    assert found["reasons"]["double"]["rows2"]["xla"] is None
    assert "this is tpu (TPU v5 lite)" in found["reasons"]["double"]["rows2"]["mosaic_gpu"]
    assert found["jax"]


def test_table_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    _print_table(kernel_report("h200"))
    text = capsys.readouterr().out
    assert "operation" in text
    assert text.count("double") == 1  # once for its three lines
    assert "1 of 2 cases" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a MODEL, or --kernels"),
        (["--target", "h200"], "give both"),
        (["model", "--kernels", "--json"], "prints one thing"),
    ],
)
def test_options_that_make_no_sense_together(arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output
