"""The C++ kernels where there is no compiler, no place to keep the library, or one already built."""

import ctypes
import logging
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import build, library, zeros_on_demand
from pallas_kernels.cpu.build import CannotBuild, built_library
from pallas_kernels.cpu.isa import ISA, available_isas
from pallas_kernels.quantized_matmul import quantize_cpu_weight, quantized_matmul

PLAIN = ISA("generic")


@pytest.fixture
def source(monkeypatch, tmp_path):
    """A package of one small kernel file in place of ours."""
    path = tmp_path / "sources" / "answer" / "cpu.cc"
    path.parent.mkdir(parents=True)
    path.write_text('extern "C" __attribute__((visibility("default"))) int answer() { return 42; }\n')
    monkeypatch.setattr(build, "ROOT", tmp_path / "sources")
    return path


@pytest.fixture
def fresh():
    """No library asked for yet, before the test and after it."""
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


def answer(path):
    return ctypes.CDLL(str(path)).answer()


def must_not_compile(*args):
    raise AssertionError("compiled although the library was there")


def test_the_library_is_kept_and_used_again(monkeypatch, source, tmp_path):
    first = built_library(PLAIN, tmp_path / "cache")
    assert first.parent == tmp_path / "cache"
    assert [each.name for each in first.parent.glob("*.so")] == [first.name]
    monkeypatch.setattr(build, "_compile", must_not_compile)
    assert built_library(PLAIN, tmp_path / "cache") == first
    assert answer(first) == 42


@pytest.mark.parametrize("change", ["source", "header", "options"])
def test_what_it_is_made_of_names_it(source, tmp_path, change):
    first = built_library(PLAIN, tmp_path / "cache")
    isa = PLAIN
    if change == "source":
        source.write_text(source.read_text().replace("42", "43"))
    elif change == "header":
        (source.parent / "new.h").write_text("// nothing")
    else:
        isa = ISA("generic", ("-DNOTHING",))
    assert built_library(isa, tmp_path / "cache") != first


def test_a_folder_that_cannot_be_written_is_no_obstacle(source, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        path = built_library(PLAIN, tmp_path / "file" / "cache")
    assert answer(path) == 42
    assert sum("could not be kept" in each.message for each in caplog.records) == 1


def test_the_compilers_message_is_in_the_reason(source, tmp_path):
    source.write_text("int answer() { return fourty_two; }\n")
    with pytest.raises(CannotBuild, match="fourty_two"):
        built_library(PLAIN, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.parametrize(("compiler", "reason"), [
    ("/bin/false", r"the C\+\+ compiler /bin/false failed: exit status 1 and no message"),
    ("no-such-compiler", r"no C\+\+ compiler \(no-such-compiler is not installed\); install g\+\+ or clang"),
])  # fmt: skip
def test_without_a_compiler_xla_computes_and_says_so_once(monkeypatch, fresh, caplog, rng, compiler, reason):
    monkeypatch.setenv("CXX", compiler)
    weight = quantize_cpu_weight(rng.standard_normal((8, 32)).astype(np.float32))
    x = jnp.ones((2, 32))
    with caplog.at_level(logging.WARNING):
        out = [quantized_matmul(x, weight) for _ in range(3)]
    np.testing.assert_array_equal(np.asarray(out[0]), np.asarray(quantized_matmul(x, weight, implementation="xla")))
    assert sum("XLA's slower code runs instead" in each.message for each in caplog.records) == 1
    with pytest.raises(NotImplementedError, match="cpu needs its C.. library: " + reason):
        quantized_matmul(x, weight, implementation="cpu")


def test_a_library_that_does_not_load_is_a_reason(monkeypatch, fresh, tmp_path):
    (tmp_path / "broken.so").write_text("nonsense")
    monkeypatch.setattr(library, "built_library", lambda isa: tmp_path / "broken.so")
    with pytest.raises(NotImplementedError, match="the library does not load"):
        library.cpu_library()


def test_instruction_sets():
    assert [isa.name for isa in available_isas(frozenset())] == ["generic"]
    avx2 = frozenset("avx avx2 bmi1 bmi2 f16c fma movbe".split())  # noqa: SIM905
    assert [isa.name for isa in available_isas(avx2)] == ["avx2", "generic"]
    assert [isa.name for isa in available_isas(avx2 - {"f16c"})] == ["generic"]


def test_zeros_take_memory_when_they_are_written():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    zeros_on_demand((1 << 12,), jnp.float32).block_until_ready()  # what calls need once
    set_one = jax.jit(lambda x: x.at[7].set(1), donate_argnums=0)
    size = 64 << 20
    before = resident()
    x = zeros_on_demand((size // 4,), jnp.float32)
    x = set_one(x)
    x.block_until_ready()
    if sys.platform == "linux":
        assert resident() - before < size // 2
    values = np.asarray(x)
    assert values[7] == 1
    assert np.count_nonzero(values) == 1


@pytest.mark.parametrize("shape", [(), (3,), (5, 4097)])
def test_zeros_of_any_size_are_zero(shape):
    for _ in range(3):  # of memory that has been used before too
        x = zeros_on_demand(shape, jnp.bfloat16)
        assert x.dtype == jnp.bfloat16
        assert not np.asarray(x).any()
        (x + 1).block_until_ready()
