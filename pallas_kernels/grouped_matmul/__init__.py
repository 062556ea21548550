"""Rows sorted by group, each times the matrix of its group (mixture of experts)."""

from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
