from pathlib import Path

import gguf
import numpy as np
import pytest


@pytest.fixture
def write_gguf(tmp_path):
    """write_gguf({name: (packed array, type)}, key=value, ...) -> path, written by the gguf library."""

    def write(tensors, name="model.gguf", **metadata) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in metadata.items():
            key = key.replace("__", ".")
            match value:
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float64(key, value)
                case str():
                    writer.add_string(key, value)
                case list():
                    writer.add_array(key, value)
        for tensor, (data, kind) in tensors.items():
            writer.add_tensor(tensor, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def small_gguf(write_gguf, rng) -> Path:
    """F32 and Q4_1 tensors, and metadata of every common kind; under 2 kB."""
    kinds = gguf.GGMLQuantizationType
    weight = rng.standard_normal((4, 64), np.float32)
    return write_gguf(
        {
            "norm": (rng.standard_normal(32, np.float32), kinds.F32),
            "weight": (gguf.quants.quantize(weight, kinds.Q4_1), kinds.Q4_1),
        },
        tokens=["a", "böß", "", "<|end|>"],
        scores=[0.5, -1.0],
        ids=[1, -2, 3],
        flags=[True, False],
        flag=True,
        eps=1e-5,
    )
