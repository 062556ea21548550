import subprocess
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest

from checkpoints.gguf_io import GGUFFile
from checkpoints.gguf_types import GGML_TYPES

KINDS = gguf.GGMLQuantizationType
NOT_DEQUANTIZABLE = {"Q8_1", "Q8_K", "Q1_0"}  # by gguf 0.19
BLOCK_TYPES = [type.name for type in GGML_TYPES.values() if type.block_size > 1]


def test_type_table_has_all_of_the_librarys():
    library = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: tuple(GGML_TYPES.get(number, ())) for number in library} == library


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_values_come_back_close_and_in_order(write_gguf, rng, name):
    weight = rng.standard_normal((48, 4160), np.float32)  # several chunks, the last one partial
    path = write_gguf({"w": (gguf.quants.quantize(weight, KINDS[name]), KINDS[name])})
    with GGUFFile(path) as file:
        read = file.read("w")
    assert file.spec("w") == ((48, 4160), name)
    assert read.dtype == np.float32
    tolerance = {"Q8_0": 0.03, "Q5_0": 0.3, "Q5_1": 0.2, "Q4_0": 0.6, "Q4_1": 0.4}[name]  # about half a step of 9
    np.testing.assert_allclose(read, weight, atol=tolerance)


@pytest.mark.parametrize("name", sorted(set(BLOCK_TYPES) - NOT_DEQUANTIZABLE))
def test_every_block_type_equals_the_library(write_gguf, rng, name):
    block, block_bytes = gguf.GGML_QUANT_SIZES[KINDS[name]]
    packed = rng.integers(0, 256, (3, 5 * block_bytes), np.uint8)
    path = write_gguf({"w": (packed, KINDS[name])})
    with GGUFFile(path) as file, np.errstate(all="ignore"):
        assert file.spec("w").shape == (3, 5 * block)
        np.testing.assert_array_equal(file.read("w"), gguf.quants.dequantize(packed, KINDS[name]))
        raw, kind = file.read_packed("w")
    np.testing.assert_array_equal(raw, packed)
    assert kind == name


@pytest.mark.parametrize("name", sorted(NOT_DEQUANTIZABLE))
def test_types_without_dequantization_say_so(write_gguf, name):
    path = write_gguf({"w": (np.zeros((2, gguf.GGML_QUANT_SIZES[KINDS[name]][1]), np.uint8), KINDS[name])})
    with (
        GGUFFile(path) as file,
        pytest.raises(ValueError, match=rf"model.gguf.*'w'.*{name}.*it can do .*Q4_K"),
    ):
        file.read("w")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int8, np.int32, ml_dtypes.bfloat16])
def test_plain_types_are_views_of_the_file(write_gguf, rng, dtype):
    values = (rng.standard_normal((5, 7)) * 10).astype(dtype)
    kind = {"bfloat16": "BF16", "int8": "I8", "int32": "I32"}.get(values.dtype.name, f"F{values.itemsize * 8}")
    stored = values.view(np.uint8) if kind == "BF16" else values
    path = write_gguf({"w": (stored, KINDS[kind])})
    with GGUFFile(path) as file:
        read = file.read("w")
    assert file.spec("w") == ((5, 7), kind)
    assert read.dtype == dtype
    assert not read.flags.owndata
    assert not read.flags.writeable
    np.testing.assert_array_equal(read, values)  # valid after close


def test_metadata_round_trip(small_gguf):
    with GGUFFile(small_gguf) as file:
        assert file.names() == ["norm", "weight"]
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["tokens"] == ["a", "böß", "", "<|end|>"]
        assert file.metadata["scores"] == [0.5, -1.0]
        assert file.metadata["ids"] == [1, -2, 3]
        assert file.metadata["flags"] == [True, False]
        assert file.metadata["flag"] is True
        assert file.metadata["eps"] == 1e-5
        assert type(file.metadata["ids"][0]) is int


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment_is_followed(tmp_path, rng, alignment):
    values = rng.standard_normal((3, 5), np.float32)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_custom_alignment(alignment)
    for name, shift in (("a", 0), ("b", 1)):
        writer.add_tensor(name, values + np.float32(shift))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile(tmp_path / "model.gguf") as file:
        np.testing.assert_array_equal(file.read("b"), values + 1)


def test_opening_and_plain_reads_do_not_import_the_gguf_library(small_gguf):
    code = (
        "import sys; from checkpoints.gguf_io import GGUFFile; file = GGUFFile(sys.argv[1]);"
        "file.read('norm');"
        "assert not {'gguf', 'jax'} & sys.modules.keys();"
        "file.read('weight'); assert 'gguf' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(small_gguf)], check=True)


def test_split_files_are_one_model(write_gguf, rng):
    parts = [rng.standard_normal((2, 3), np.float32) for _ in range(3)]
    paths = [
        write_gguf(
            {f"t{number}": (part, KINDS.F32)},
            name=f"m-{number + 1:05}-of-00003.gguf",
            split__no=number,
            split__count=3,
            split__tensors__count=3,
            **({"who": "first"} if number == 0 else {}),
        )
        for number, part in enumerate(parts)
    ]
    for path in paths:  # any part opens the whole
        with GGUFFile(path) as file:
            assert file.names() == ["t0", "t1", "t2"]
            assert file.metadata["who"] == "first"
            for number, part in enumerate(parts):
                np.testing.assert_array_equal(file.read(f"t{number}"), part)
    renamed = paths[0].rename(paths[0].with_name("renamed.gguf"))
    with pytest.raises(ValueError, match=r"split into 3 files.*NAME-00001-of-00003\.gguf"):
        GGUFFile(renamed)
    renamed.rename(paths[0])
    paths[1].unlink()
    with pytest.raises(ValueError, match="part 2 of 3 of a split model is missing"):
        GGUFFile(paths[0])
    paths[2].rename(paths[1])
    with pytest.raises(ValueError, match=r"wanted split.no 1, got 2"):
        GGUFFile(paths[0])


def test_reading_after_close_and_unknown_names(small_gguf):
    with GGUFFile(small_gguf) as file:
        for call in (file.read, file.spec, file.read_packed):
            with pytest.raises(ValueError, match=r"model.gguf: no tensor 'wieght'; did you mean weight\?"):
                call("wieght")
    with pytest.raises(ValueError, match="closed"):
        file.read("norm")
