"""Compiled steps on disk: found again, told apart by what goes into them, and never trusted when damaged."""

import dataclasses
import logging

import jax
import numpy as np
import pytest

from jaxinfer import compile_cache
from jaxinfer.compile_cache import ProgramCache
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.sampling.params import SamplingParams

OPTIONS = EngineConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=32)
DEVICE = jax.devices()[0]


def add(cache, parts=("add",), value=1.0):
    """A compiled x + value that donates x, through the cache."""
    x = np.zeros(4, np.float32)
    return cache.get(parts, (x,), DEVICE, lambda: jax.jit(lambda x: x + value, donate_argnums=0).lower(x).compile())


def test_an_engine_runs_the_steps_that_another_has_compiled(model, tmp_path):
    def run():
        engine = Engine(model, OPTIONS, programs=ProgramCache(tmp_path))
        engine.add_request("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        while engine.has_work:
            engine.step()
        return engine.pop_output("a").outputs[0].token_ids, engine.stats().compile

    first, compiled = run()
    again, found = run()
    assert again == first
    assert (compiled.num_compiled, compiled.num_loaded) == (2, 0)
    assert (found.num_compiled, found.num_loaded) == (0, 2)


def test_a_program_is_found_by_all_that_goes_into_it(tmp_path, monkeypatch):
    cache = ProgramCache(tmp_path)
    assert not add(cache)[1]
    program, found = add(cache)
    assert found
    x = jax.device_put(np.ones(4, np.float32), DEVICE) + 0
    np.testing.assert_array_equal(program(x), 2)
    assert x.is_deleted()  # donated as when it was compiled
    assert not add(cache, ("add", dataclasses.replace(OPTIONS, page_size=8)))[1]
    with jax.default_matmul_precision("float32"):
        assert not add(cache)[1]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    assert not add(cache)[1]
    monkeypatch.undo()
    monkeypatch.setattr(compile_cache, "_sources", lambda: "other sources")
    assert not add(cache)[1]


@pytest.mark.parametrize("damage", [b"", b"another file", None])
def test_a_damaged_file_is_said_and_written_again(tmp_path, caplog, damage):
    cache = ProgramCache(tmp_path)
    add(cache)
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage is None else damage)
    with caplog.at_level(logging.WARNING):
        assert not add(cache)[1]
    assert [record.message for record in caplog.records] == [f"{file} is damaged: compiled again"]
    assert add(cache)[1]


def test_a_file_of_another_making_is_said_and_written_again(tmp_path, caplog):
    cache = ProgramCache(tmp_path)
    add(cache)
    [file] = tmp_path.iterdir()
    payload = b"no pickle"
    file.write_bytes(compile_cache.MAGIC + compile_cache.hashlib.sha256(payload).digest() + payload)
    assert not add(cache)[1]
    assert "cannot be loaded" in caplog.text
    assert add(cache)[1]


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path, caplog):
    (tmp_path / "file").touch()
    program, found = add(ProgramCache(tmp_path / "file" / "folder"))
    assert not found
    np.testing.assert_array_equal(program(np.ones(4, np.float32)), 2)
    assert "could not be kept" in caplog.text


def test_the_least_used_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "MAX_PROGRAMS", 2)
    cache = ProgramCache(tmp_path)
    for value in range(3):
        add(cache, ("add", value), value)
    assert len(list(tmp_path.iterdir())) == 2
    assert add(cache, ("add", 2), 2)[1]


def test_a_full_disk_leaves_no_part_behind(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compile_cache.os, "replace", full)
    program, found = add(ProgramCache(tmp_path))
    assert not found
    np.testing.assert_array_equal(program(np.ones(4, np.float32)), 2)
    assert "could not be kept" in caplog.text
    assert not list(tmp_path.iterdir())
