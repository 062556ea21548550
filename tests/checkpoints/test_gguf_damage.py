"""Damaged GGUF files give ValueError: never another exception, a hang or a huge allocation."""

import contextlib
import struct
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from checkpoints.gguf_header import parse_header
from checkpoints.gguf_io import GGUFFile

WHERE = Path("model.gguf")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def file_bytes(values=(), tensors=(), version=3, data=b"", counts=None) -> bytes:
    """A GGUF file by hand: values are (key, type, payload), tensors (name, dims, type, offset)."""
    num_tensors, num_values = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)
    head += b"".join(text(key) + struct.pack("<I", kind) + payload for key, kind, payload in values)
    for name, dims, kind, offset in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return head + b"\0" * (-len(head) % 32) + data


def test_hand_made_file_is_good():
    buffer = file_bytes([(b"k", 4, struct.pack("<I", 7))], [(b"t", (3, 2), 0, 0)], data=bytes(24))
    header = parse_header(buffer, WHERE)
    assert header.metadata == {"k": 7}
    assert header.tensors["t"].shape == (2, 3)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (b"PK\3\4" + bytes(64), r"model.gguf: wanted a GGUF file .*got b'PK\\x03\\x04'"),
        (b"GG", "wanted a GGUF file"),
        (file_bytes(version=1), "GGUF version 1, wanted 2 or 3"),
        (file_bytes(version=0), "GGUF version 0, wanted 2 or 3"),
        (file_bytes(version=3 << 24), "big-endian"),
        (file_bytes(counts=(0, 2**62)), "truncated or damaged"),
        (file_bytes(counts=(2**62, 0)), "truncated or damaged"),
        (file_bytes([(b"k", 8, struct.pack("<Q", 2**63))]), "ends beyond the file"),
        (file_bytes([(b"k", 9, struct.pack("<IQ", 8, 2**40))]), "truncated or damaged"),
        (file_bytes([(b"k", 9, struct.pack("<IQ", 6, 2**60))]), "truncated or damaged"),
        (file_bytes([(b"k", 9, struct.pack("<IQ", 9, 1) * 5)], data=bytes(64)), "nests arrays"),
        (file_bytes([(b"k", 13, b"")], data=bytes(64)), "value type 13"),
        (file_bytes([(b"k", 9, struct.pack("<IQ", 77, 1))], data=bytes(64)), "array of type 77"),
        (file_bytes([(b"k", 8, text(b"\xff\xfe"))]), "not UTF-8"),
        (file_bytes([(b"k", 7, b"\1")] * 2, data=bytes(64)), "metadata 'k' twice"),
        (
            file_bytes([(b"general.alignment", 4, struct.pack("<I", 24))]),
            "general.alignment is 24, wanted a power",
        ),
        (file_bytes([(b"general.alignment", 8, text(b"x"))]), "general.alignment is 'x'"),
        (file_bytes(tensors=[(b"t", (1,), 0, 0)] * 2, data=bytes(32)), "tensor 't' twice"),
        (file_bytes(tensors=[(b"t", (1,), 5, 0)], data=bytes(32)), "'t' has unknown type 5; known: F32=0"),
        (file_bytes(tensors=[(b"t", (1,) * 5, 0, 0)], data=bytes(32)), "5 dimensions, at most 4"),
        (
            file_bytes(tensors=[(b"t", (33,), 2, 0)], data=bytes(99)),
            r"rows of 33 are not whole blocks of Q4_0 \(32\)",
        ),
        (
            file_bytes(tensors=[(b"t", (8,), 0, 8)], data=bytes(99)),
            "offset 8, not a multiple of the alignment 32",
        ),
        (file_bytes(tensors=[(b"t", (9,), 0, 0)], data=bytes(35)), r"'t' \[9\] F32 ends at byte .*truncated"),
        (
            file_bytes(tensors=[(b"t", (2**32, 2**32), 0, 0)], data=bytes(35)),
            "truncated",
        ),  # overflows 64 bits
    ],
)
def test_each_damage_has_its_message(buffer, message):
    with pytest.raises(ValueError, match=message):
        parse_header(buffer, WHERE)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        GGUFFile(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ValueError, match="is empty"):
        GGUFFile(tmp_path / "empty.gguf")


def test_a_file_cut_anywhere_is_refused(small_gguf):
    whole = small_gguf.read_bytes()
    header = parse_header(whole, WHERE)
    end = max(info.start + info.nbytes for info in header.tensors.values())
    for length in range(end):
        with pytest.raises(ValueError, match=WHERE.stem):
            parse_header(whole[:length], WHERE)
    parse_header(whole[:end], WHERE)
    small_gguf.write_bytes(whole[: end - 1])
    with pytest.raises(ValueError, match="truncated"):
        GGUFFile(small_gguf)


def read_all(buffer: bytes, path: Path) -> None:
    parse_header(buffer, WHERE)  # most stop here, without a file
    path.write_bytes(buffer)
    with GGUFFile(path) as file:
        for name in file.names():
            file.read(name)


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x20, 0x7F, 0x80, 0xFF])
def test_any_header_byte_changed_gives_a_value_error_or_a_model(small_gguf, byte):
    whole = bytearray(small_gguf.read_bytes())
    end = min(info.start for info in parse_header(bytes(whole), WHERE).tensors.values())
    refused = 0
    with np.errstate(all="ignore"):
        for position in range(end):
            kept, whole[position] = whole[position], byte
            try:
                read_all(bytes(whole), small_gguf)
            except ValueError:
                refused += 1
            whole[position] = kept
    assert refused > 20


@hypothesis.given(data=st.binary(max_size=300), count=st.integers(0, 9))
def test_random_bytes_after_a_good_start(data, count):
    head = b"GGUF" + struct.pack("<IQQ", 3, count, count)
    with contextlib.nullcontext() if count == 0 else pytest.raises(ValueError, match=WHERE.stem):
        parse_header(head + data, WHERE)
