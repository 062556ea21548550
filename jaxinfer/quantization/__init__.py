"""Packed weights: the array type that stands in for a matrix, and how loading makes it."""

from jaxinfer.quantization.qarray import QArray, is_packed, take_rows

__all__ = ["QArray", "is_packed", "take_rows"]
