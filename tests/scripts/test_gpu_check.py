"""The run for a GPU machine, dry on CPU; and how it survives what GPU programs do."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path("scripts/gpu_check.py")


@pytest.fixture
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_dry_run(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=1800)
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(found["sections"]) == ["roofs", "numerics", "decode", "flash", "quantized", "engine", "specs"]
    failed = {
        item: result
        for section in found["sections"].values()
        for item, result in section["results"].items()
        if "error" in result or not result.get("ok", True)
    }
    assert not failed
    assert "DRY RUN" in (tmp_path / "gpu_check.md").read_text()
    assert {"compile", "prefill", "decode, 1 rows"} <= set(found["sections"]["engine"]["results"])


def test_a_section_goes_on_after_an_item_that_hangs_and_one_that_ends_the_process(gpu_check, tmp_path, monkeypatch):
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"""
import importlib.util, os, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("gpu_check", {str(SCRIPT.resolve())!r})
gpu_check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_check)
def refuse(): raise NotImplementedError("not here")
def fail(): raise RuntimeError("wrong | result")
def items(section, dry_run):
    yield "good", lambda: {{"us": 1.0, "spread": 0.1, "flops_per_s": 2e12}}
    yield "hangs", lambda: time.sleep(60)
    yield "aborts", os.abort
    yield "refuses", refuse
    yield "fails", fail
gpu_check.section_items = items
gpu_check.child("flash", Path(sys.argv[sys.argv.index("--out") + 1]) / "flash.jsonl", False)
"""
    )
    monkeypatch.setattr(gpu_check, "__file__", str(driver))
    found = gpu_check.run_section("flash", 60, 2.0, tmp_path, dry_run=False)
    results = found["results"]
    assert list(results) == ["good", "hangs", "aborts", "refuses", "fails"]
    assert results["hangs"]["error"] == "took more than 2 s"
    assert "code -6" in results["aborts"]["error"]
    assert results["refuses"]["declined"] == "not here"
    assert results["fails"]["error"] == "RuntimeError: wrong | result"
    table = gpu_check.markdown({"dry_run": False, "machine": {"card": "none"}, "sections": {"flash": found}})
    assert "| good | 1.0 us ± 5 %, 2.0 TFLOP/s |" in table
    assert "wrong / result" in table
