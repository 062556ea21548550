import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.page_copy import mosaic_gpu, mosaic_tpu, tiles
from pallas_kernels.page_copy.api import copy_pages, gather_pages, scatter_pages
from pallas_kernels.page_copy.specs import SPECS
from pallas_kernels.pages import QuantizedPages
from tests.pallas_kernels.gpu_interpreter import interpreted
from tests.pallas_kernels.targets import lower, targeting

K, P, PAGE_SIZE, H = 2, 7, 4, 32
FORK = ([1, 2, 0], [4, 6, 0])  # the last entry is padding
CYCLE = ([1, 2, 3, 0], [2, 3, 1, 0])
BACKENDS = ("xla", "mosaic_gpu", "mosaic_tpu")


@pytest.fixture
def pages(rng):
    """A plain and a quantized cache; every page is distinct, and page 0 is NaN."""
    plain = rng.standard_normal((K, P, PAGE_SIZE, H)).astype(np.float32)
    scale = rng.standard_normal((K, P, PAGE_SIZE)).astype(np.float32)
    plain[:, 0] = scale[:, 0] = np.nan
    data = rng.integers(0, 256, (K, P, PAGE_SIZE, H // 2)).astype(np.uint8)
    quantized = QuantizedPages(jnp.asarray(data), jnp.asarray(scale), jnp.asarray(-scale), 4)
    return {"k": jnp.asarray(plain, jnp.bfloat16), "v": quantized}


def _run(name, backend, *arguments, **options):
    if backend == "xla":
        function = {"copy_pages": copy_pages, "gather_pages": gather_pages, "scatter_pages": scatter_pages}[name]
        return jax.jit(functools.partial(function, implementation="xla", **options))(*arguments)
    if backend == "mosaic_tpu":
        return jax.jit(functools.partial(getattr(mosaic_tpu, f"{name}_mosaic_tpu"), interpret=True, **options))(
            *arguments
        )
    with interpreted(detect_races=True) as interpret:
        function = functools.partial(getattr(mosaic_gpu, f"{name}_mosaic_gpu"), interpret=interpret, **options)
        return jax.block_until_ready(jax.jit(function)(*arguments))


def _assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
        # Nobody reads the null page.
        np.testing.assert_array_equal(_bytes(np.asarray(a)[:, 1:]), _bytes(np.asarray(b)[:, 1:]))


def _bytes(x):
    return np.ascontiguousarray(x).view(np.uint8)


def _oracle(pages, source, destination):
    def copy(array):
        new = np.array(array)
        new[:, destination] = np.array(array)[:, source]
        return new

    return jax.tree.map(copy, pages)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("indices", "disjoint"), [(FORK, True), (CYCLE, False)], ids=["fork", "cycle"])
def test_reads_all_pages_before_it_writes(pages, backend, indices, disjoint):
    source, destination = (jnp.array(x, jnp.int32) for x in indices)
    got = _run("copy_pages", backend, pages, source, destination, disjoint=disjoint)
    _assert_equal(got, _oracle(pages, *indices))


@pytest.mark.parametrize("backend", BACKENDS)
def test_swaps_through_a_contiguous_buffer(pages, backend):
    staged = _run("gather_pages", backend, pages, jnp.array([5, 2, 0, 1], jnp.int32))
    assert staged["v"].data.shape == (K, 4, PAGE_SIZE, H // 2)
    for got, array in zip(jax.tree.leaves(staged), jax.tree.leaves(pages)):
        wanted = np.asarray(array)[:, [5, 2, 0, 1]]
        np.testing.assert_array_equal(_bytes(np.asarray(got)), _bytes(wanted))
    got = _run("scatter_pages", backend, pages, staged, jnp.array([3, 6, 0, 2], jnp.int32))
    _assert_equal(got, _oracle(pages, [5, 2, 0, 1], [3, 6, 0, 2]))


def test_is_in_place_when_donated(pages):
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pages)]
    source, destination = (jnp.array(x, jnp.int32) for x in CYCLE)
    out = jax.jit(copy_pages, donate_argnums=0)(pages, source, destination)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(out)] == addresses


def test_the_race_detector_sees_a_missing_barrier(pages, monkeypatch):
    monkeypatch.setattr(mosaic_gpu.plgpu, "barrier_wait", lambda *_: None)
    source, destination = (jnp.array(x, jnp.int32) for x in FORK)
    with pytest.raises(Exception, match="race"):
        _run("copy_pages", "mosaic_gpu", pages["k"], source, destination, disjoint=True)


def test_the_race_detector_sees_a_broken_promise(pages):
    source, destination = (jnp.array(x, jnp.int32) for x in CYCLE)
    with pytest.raises(Exception, match="race"):
        _run("copy_pages", "mosaic_gpu", pages["k"], source, destination, disjoint=True)


def test_tpu_kernel_has_no_races(pages):
    source, destination = (jnp.array(x, jnp.int32) for x in FORK)
    interpret = pltpu.InterpretParams(detect_races=True)
    got = jax.jit(functools.partial(mosaic_tpu.copy_pages_mosaic_tpu, disjoint=True, interpret=interpret))(
        pages, source, destination
    )
    _assert_equal(got, _oracle(pages, *FORK))
    from jax._src.pallas.mosaic.interpret.interpret_pallas_call import races

    assert not races.races_found


@pytest.mark.parametrize("disjoint", [True, False])
@pytest.mark.parametrize(
    ("target", "backend", "mark"), [("h200", "mosaic_gpu", "mosaic_gpu"), ("v5e", "mosaic_tpu", "tpu_custom_call")]
)
def test_lowers(pages, target, backend, mark, disjoint):
    source, destination = (jnp.array(x, jnp.int32) for x in FORK)
    function = functools.partial(copy_pages, disjoint=disjoint, implementation=backend)
    assert mark in lower(function, pages, source, destination, target=target)


def test_refuses_pages_that_the_copy_engine_cannot_move():
    odd = jnp.zeros((K, P, 3, 3))
    with targeting("h200"), pytest.raises(NotImplementedError, match=r"pages of float32\[3, 3\].*multiples of 16"):
        copy_pages(odd, jnp.arange(2), jnp.arange(2), disjoint=True, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("rows", "row_bytes", "wanted"),
    [(8, 512, (1, 8, 8)), (128, 512, (2, 64, 2)), (512, 16, (2, 256, 8)), (7, 65536, (7, 1, 1))],
)
def test_tiles_fit_a_stage(rows, row_bytes, wanted):
    assert tiles.choose_tiles(rows, row_bytes) == tiles.TileConfig(*wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": jnp.arange(3)}, r"source and destination must have shape \[C\], got \(3,\) and \(2,\)"),
        ({"pages": [jnp.zeros((2, 3, 4)), jnp.zeros((2, 4, 4))]}, r"arrays \[K, P, ...\] with one P"),
        ({"pages": jnp.zeros((2, 3))}, r"arrays \[K, P, ...\]"),
        ({"implementation": "fastest"}, "copy_pages: unknown implementation='fastest'"),
    ],
)
def test_refuses(pages, change, message):
    arguments = {"pages": pages, "source": jnp.arange(2), "destination": jnp.arange(2)}
    with pytest.raises(ValueError, match=message):
        copy_pages(**(arguments | change))


def test_refuses_a_buffer_that_does_not_fit(pages):
    staged = jax.tree.map(lambda x: x[:, :2], pages)
    with pytest.raises(ValueError, match=r"must be bfloat16\[2, 3, 4, 32\], got bfloat16\[2, 2, 4, 32\]"):
        scatter_pages(pages, staged, jnp.arange(3))
    with pytest.raises(ValueError, match="staged must be a tree like pages"):
        scatter_pages(pages, staged["k"], jnp.arange(2))
    with pytest.raises(ValueError, match=r"source must have shape \[C\]"):
        gather_pages(pages, jnp.zeros((2, 2), jnp.int32))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_specs_are_valid(spec):
    pages, source, destination = jax.eval_shape(spec.arguments)
    out = jax.eval_shape(lambda *a: spec.function(*a, implementation="xla"), pages, source, destination)
    assert jax.tree.structure(out) == jax.tree.structure(pages)
    page_bytes = sum(x.size // x.shape[1] * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert spec.num_bytes == 2 * source.size * page_bytes
