import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.packing import pack, unpack


def _packed_by_hand(values: np.ndarray, bits: int, block: int) -> np.ndarray:
    """One row, a byte at a time."""
    stride = block * bits // 8
    out = []
    for start in range(0, len(values), block):
        for j in range(stride):
            byte = sum(int(values[start + j + i * stride]) << (i * bits) for i in range(8 // bits))
            out.append(byte)
    return np.array(out, np.uint8)


@settings(max_examples=12)
@given(data=st.data(), bits=st.sampled_from([2, 4, 8]), planes=st.sampled_from([1, 2, 5]), blocks=st.integers(1, 2))
def test_unpack_inverts_pack(data, bits, planes, blocks):
    block = planes * 8 // bits
    values = np.array(
        data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=block * blocks, max_size=block * blocks)), np.uint8
    )
    packed = np.asarray(pack(jax.numpy.asarray(values), bits, block))
    np.testing.assert_array_equal(packed, _packed_by_hand(values, bits, block))
    np.testing.assert_array_equal(np.asarray(unpack(packed, bits, block)), values)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_leading_axes_and_jit(rng, bits):
    values = rng.integers(0, 2**bits, (2, 3, 64), dtype=np.uint8)
    packed = jax.jit(pack, static_argnums=(1, 2))(values, bits, 32)
    assert packed.shape == (2, 3, 8 * bits)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(np.asarray(packed[1, 2]), _packed_by_hand(values[1, 2], bits, 32))
    np.testing.assert_array_equal(np.asarray(jax.jit(unpack, static_argnums=(1, 2))(packed, bits, 32)), values)


def test_q4_0_blocks_of_gguf_are_the_same():
    values = np.arange(32, dtype=np.uint8) % 16
    packed = np.asarray(pack(jax.numpy.asarray(values), 4, 32))
    np.testing.assert_array_equal(packed & 15, values[:16])
    np.testing.assert_array_equal(packed >> 4, values[16:])


def test_wrong_arguments_are_explained():
    values = np.zeros((2, 64), np.uint8)
    with pytest.raises(ValueError, match="bits must be 2, 4 or 8, got 3"):
        pack(values, 3, 32)
    with pytest.raises(ValueError, match="64 values can not be packed in blocks of 48 with 2 values a byte"):
        pack(values, 4, 48)
    with pytest.raises(ValueError, match="in blocks of 34 with 4 values"):
        unpack(values, 2, 34)
