import threading

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from checkpoints.gguf_io import GGUFFile
from checkpoints.load import Target, load_tree
from checkpoints.safetensors_io import SafetensorsSource
from checkpoints.sources import TensorSpec, aligned_empty
from checkpoints.trees import flatten, unflatten


class Source:
    """Arrays in memory that count their reads."""

    path = "memory"

    def __init__(self, **arrays):
        self.arrays = arrays
        self.reads = []

    def names(self):
        return list(self.arrays)

    def spec(self, name):
        return TensorSpec(self.arrays[name].shape, self.arrays[name].dtype.name)

    def read(self, name):
        self.reads.append(name)
        return self.arrays[name]

    def close(self): ...

    def __enter__(self): ...

    def __exit__(self, *_): ...


def leaf(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@pytest.fixture
def source(rng):
    return Source(
        embed=rng.standard_normal((16, 8), np.float32),
        qkv=rng.standard_normal((12, 8), np.float32),
        steps=np.arange(3, dtype=np.int32),
    )


ABSTRACT = {
    "embed": {"weight": leaf(16, 8)},
    "attention": {"q": leaf(8, 8, dtype=jnp.bfloat16), "k": leaf(4, 8)},
    "steps": leaf(3, dtype=jnp.int32),
}


def top(array):
    return array[:8]


def bottom(array):
    return array[8:]


PLAN = {
    "embed": Target("embed/weight"),
    "qkv": (Target("attention/q", top), Target("attention/k", bottom)),
    "steps": Target("steps"),
}


def test_every_leaf_gets_its_values_dtype_and_place_in_the_tree(source):
    tree = load_tree(source, PLAN, ABSTRACT)
    assert jax.tree.structure(tree) == jax.tree.structure(ABSTRACT)
    np.testing.assert_array_equal(tree["embed"]["weight"], source.arrays["embed"])
    np.testing.assert_array_equal(tree["attention"]["q"], source.arrays["qkv"][:8].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(tree["attention"]["k"], source.arrays["qkv"][8:])
    assert tree["attention"]["q"].dtype == jnp.bfloat16
    assert tree["steps"].dtype == jnp.int32
    assert sorted(source.reads) == ["embed", "qkv", "steps"]  # a fused tensor is read once


def test_dtype_replaces_floating_dtypes_only(source):
    tree = load_tree(source, PLAN, ABSTRACT, dtype=jnp.float16)
    assert {array.dtype.name for array in jax.tree.leaves(tree)} == {"float16", "int32"}
    np.testing.assert_array_equal(tree["embed"]["weight"], source.arrays["embed"].astype(np.float16))


def test_progress_counts_to_the_total(source):
    calls = []
    load_tree(source, PLAN, ABSTRACT, progress=lambda *call: calls.append((*call, threading.current_thread())))
    total = 16 * 8 * 4 + 8 * 8 * 2 + 4 * 8 * 4 + 3 * 4
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert len(calls) == 4
    assert calls[-1][:2] == (total, total)
    assert {call[2] for call in calls} == {threading.main_thread()}


def test_all_problems_are_in_one_message_and_nothing_is_read(source):
    plan = {
        "embed": Target("embed/wieght"),
        "gone": Target("steps"),
        "qkv": (Target("attention/q", top), Target("attention/q", bottom), Target("attention/k")),
    }
    with pytest.raises(ValueError, match="memory does not fit the model") as caught:
        load_tree(source, plan, ABSTRACT)
    message = str(caught.value)
    assert "1 tensors that the plan names and the source lacks: gone" in message
    assert "1 source tensors that the plan does not name (add them to plan or ignore): steps" in message
    assert "1 leaves that no source tensor fills: embed/weight" in message
    assert "1 leaves that the tree does not have: embed/wieght" in message
    assert "1 leaves filled more than once: attention/q" in message
    assert "1 wrong shapes: qkv -> attention/k: wanted [4, 8], got [12, 8]" in message
    assert source.reads == []


def test_long_lists_are_shortened():
    source = Source(**{f"t{number:02}": np.zeros(1) for number in range(30)})
    with pytest.raises(ValueError, match=r"30 source tensors .* t09, and 20 more$"):
        load_tree(source, {}, {})


def test_ignore_skips_only_full_matches(source):
    source.arrays |= {"rope_freqs.weight": np.zeros(1), "rope_freqs.weight2": np.zeros(1)}
    with pytest.raises(ValueError, match=r"1 source tensors .*: rope_freqs.weight2$"):
        load_tree(source, PLAN, ABSTRACT, ignore=[r"rope_freqs\.weight", "embed"])
    tree = load_tree(source, PLAN, ABSTRACT, ignore=["rope_freqs.*"])
    assert "rope_freqs.weight" not in source.reads
    assert set(tree) == set(ABSTRACT)


def test_errors_of_transform_and_dtype_name_the_tensor(source):
    with pytest.raises(
        ValueError, match=r"qkv -> attention/k: wanted shape \[4, 8\], got \[8, 8\] after its transform"
    ):
        load_tree(source, PLAN | {"qkv": (Target("attention/q", top), Target("attention/k", top))}, ABSTRACT)
    with pytest.raises(ValueError, match="steps -> steps: wanted int32, got float32"):
        load_tree(source, PLAN | {"steps": Target("steps", np.float32)}, ABSTRACT)


def test_an_error_while_reading_is_raised(source):
    def broken(name):
        raise OSError("disk gone")

    source.read = broken
    with pytest.raises(OSError, match="disk gone"):
        load_tree(source, PLAN, ABSTRACT)


def test_aligned_memory_is_taken_without_a_copy():
    array = aligned_empty((64, 64), np.dtype(np.float32))
    array[...] = 1
    tree = load_tree(Source(w=array), {"w": Target("w")}, {"w": leaf(64, 64)})
    assert tree["w"].unsafe_buffer_pointer() == array.ctypes.data
    # and donating it must not write into the source, which may be a read-only file
    jax.jit(lambda w: w + 1, donate_argnums=0)(tree["w"]).block_until_ready()
    assert array[0, 0] == 1


@pytest.fixture
def mesh():
    assert jax.device_count() == 8
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_sharded_leaves_are_placed_slice_by_slice(source, mesh):
    rows = jax.sharding.NamedSharding(mesh, jax.P("model", None))
    both = jax.sharding.NamedSharding(mesh, jax.P("data", "model"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    shardings = {"embed": {"weight": rows}, "attention": {"q": both, "k": both}, "steps": everywhere}
    tree = load_tree(source, PLAN, ABSTRACT, shardings=shardings)
    plain = load_tree(source, PLAN, ABSTRACT)
    for path, array in flatten(tree).items():
        assert array.sharding == flatten(shardings)[path]
        np.testing.assert_array_equal(array, flatten(plain)[path])
    assert tree["embed"]["weight"].addressable_shards[0].data.shape == (4, 8)
    assert tree["attention"]["q"].addressable_shards[0].data.shape == (4, 2)


def test_shardings_come_from_one_for_all_or_from_the_leaves(source, mesh):
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    tree = load_tree(source, PLAN, ABSTRACT, shardings=everywhere)
    assert {array.sharding for array in jax.tree.leaves(tree)} == {everywhere}
    second = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    tree = load_tree(source, PLAN, ABSTRACT | {"steps": leaf(3, dtype=jnp.int32, sharding=second)})
    assert tree["steps"].devices() == {jax.devices()[1]}
    assert tree["embed"]["weight"].devices() == {jax.devices()[0]}


def test_bad_shardings(source, mesh):
    columns = jax.sharding.NamedSharding(mesh, jax.P(("data", "model")))
    with pytest.raises(ValueError, match=r"2 shardings that do not fit: attention/k.*, steps: "):
        load_tree(source, PLAN, ABSTRACT, shardings=columns)
    with pytest.raises(ValueError, match="different leaves: attention/k, attention/q, embed/weight"):
        load_tree(source, PLAN, ABSTRACT, shardings={"steps": columns})


def test_from_safetensors_and_from_gguf(tmp_path, write_gguf, rng, mesh):
    weight = rng.standard_normal((8, 64), np.float32)
    columns = jax.sharding.NamedSharding(mesh, jax.P(None, "model"))
    safetensors.numpy.save_file({"w": weight.astype(ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    with SafetensorsSource(tmp_path) as source:
        tree = load_tree(source, {"w": Target("w")}, {"w": leaf(8, 64, dtype=jnp.bfloat16)}, shardings=columns)
    np.testing.assert_array_equal(tree["w"], weight.astype(ml_dtypes.bfloat16))
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(weight, kind)
    with GGUFFile(write_gguf({"w": (packed, kind)})) as source:
        tree = load_tree(source, {"w": Target("w")}, {"w": leaf(8, 64)}, shardings=columns)
    np.testing.assert_array_equal(tree["w"], gguf.quants.dequantize(packed, kind))


def test_packed_bytes_of_a_format_without_them(source):
    assert not hasattr(source, "read_packed")
    name = source.names()[0]
    abstract = {"leaf": jax.ShapeDtypeStruct(source.spec(name).shape, jnp.float32)}
    others = [each for each in source.names() if each != name]
    with pytest.raises(ValueError, match=f"wants the packed bytes of {name}, and this format has none"):
        load_tree(source, {name: Target("leaf", raw=True)}, abstract, ignore=others)


def test_flatten_and_unflatten():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert flatten(tree) == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert unflatten(flatten(tree)) == tree
    with pytest.raises(ValueError, match="wanted keys without '/'"):
        flatten({"a/b": 1})
