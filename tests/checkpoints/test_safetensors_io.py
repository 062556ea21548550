import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from checkpoints.safetensors_io import SafetensorsSource
from checkpoints.sources import open_source

INDEX = "model.safetensors.index.json"


def write_shards(folder, shards):
    """shards: {file name: {tensor name: array}}; returns the index, still to be written."""
    for file, tensors in shards.items():
        safetensors.numpy.save_file(tensors, folder / file, metadata={"format": "pt"})
    return {
        "metadata": {},
        "weight_map": {name: file for file, tensors in shards.items() for name in tensors},
    }


@pytest.fixture
def sharded(tmp_path, rng):
    shards = {
        f"model-0000{number}-of-00002.safetensors": {
            f"layers.{number}.w": rng.standard_normal((4, 6)).astype(ml_dtypes.bfloat16),
            f"layers.{number}.b": rng.standard_normal(4).astype(np.float32),
        }
        for number in (1, 2)
    }
    (tmp_path / INDEX).write_text(json.dumps(write_shards(tmp_path, shards)))
    return tmp_path, shards


def write_raw(path, header, data=b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_sharded_directory(sharded):
    folder, shards = sharded
    with open_source(folder) as source:
        wanted = {name: array for tensors in shards.values() for name, array in tensors.items()}
        assert set(source.names()) == set(wanted)
        assert source.spec("layers.1.w") == ((4, 6), "BF16")
        arrays = {name: source.read(name) for name in wanted}
    for name, array in wanted.items():  # still valid after close
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16, "int64", "int8", "uint8"])
def test_every_dtype(tmp_path, rng, dtype):
    array = (rng.standard_normal((3, 5)) * 10).clip(1, 10).astype(dtype)
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"x": array, "scalar": np.asarray(array[0, 0]), "none": array[:0]}, path)
    for source in (SafetensorsSource(path), SafetensorsSource(tmp_path)):
        assert source.read("x").dtype == dtype
        np.testing.assert_array_equal(source.read("x"), array)
        assert source.read("scalar").shape == ()
        assert source.read("none").shape == (0, 5)


def test_index_wins_over_a_single_file(sharded, rng):
    folder, _ = sharded
    safetensors.numpy.save_file({"other": np.zeros(1)}, folder / "model.safetensors")
    assert "other" not in SafetensorsSource(folder).names()


def test_unknown_name_and_closed(sharded):
    source = SafetensorsSource(sharded[0])
    with pytest.raises(ValueError, match=r"no tensor 'layers.1.x'; did you mean layers.1."):
        source.read("layers.1.x")
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.read("layers.1.w")


def test_missing_shard(sharded):
    folder, shards = sharded
    (folder / next(iter(shards))).unlink()
    with pytest.raises(ValueError, match=r"1 of 2 shards are missing: \['model-00001-of-00002"):
        SafetensorsSource(folder)


def test_index_and_shards_disagree(sharded):
    folder, shards = sharded
    index = json.loads((folder / INDEX).read_text())
    first = next(iter(shards))
    index["weight_map"]["layers.9.w"] = first
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"00001-of.*says it holds \['layers.9.w'\]"):
        SafetensorsSource(folder)
    del index["weight_map"]["layers.9.w"], index["weight_map"]["layers.2.w"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"00002-of.*holds \['layers.2.w'\].*does not list"):
        SafetensorsSource(folder)
    index["weight_map"] = {"layers.1.w": "../" + first}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="wanted plain file names"):
        SafetensorsSource(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_bad_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json: wanted"):
        SafetensorsSource(tmp_path)


def test_a_file_cut_anywhere_is_refused(sharded):
    folder, shards = sharded
    file = folder / next(iter(shards))
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="model-00001"):
            SafetensorsSource(file)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[" * 100_000,
        [],
        {"x": 3},
        {"x": ENTRY | {"dtype": "F4"}},
        {"x": ENTRY | {"shape": [-2]}},
        {"x": ENTRY | {"shape": [3]}},
        {"x": ENTRY | {"shape": [2**40, 2**40]}},
        {"x": ENTRY | {"data_offsets": [8, 16]}},
        {"x": ENTRY | {"data_offsets": [8]}},
    ],
)
def test_bad_headers(tmp_path, header):
    write_raw(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=r"x\.safetensors: truncated, damaged or not safetensors .*download it again"):
        SafetensorsSource(tmp_path / "x.safetensors")


def test_a_type_that_numpy_lacks_is_refused(tmp_path):
    write_raw(tmp_path / "x.safetensors", {"x": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, bytes(2))
    with pytest.raises(ValueError, match="'x' of type F8_E4M3 cannot be a NumPy array"):
        SafetensorsSource(tmp_path / "x.safetensors").read("x")


def test_huge_header_length_and_empty_directory(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    with pytest.raises(ValueError, match="damaged"):
        SafetensorsSource(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"wanted model.safetensors or model.safetensors.index.json.*got neither"):
        SafetensorsSource(tmp_path)


def test_open_source_refuses_other_things(tmp_path, small_gguf):
    assert open_source(small_gguf).spec("norm").dtype == "F32"
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="file of another kind"):
        open_source(tmp_path / "model.bin")
    with pytest.raises(ValueError, match="nothing at this path"):
        open_source(tmp_path / "none.gguf")
