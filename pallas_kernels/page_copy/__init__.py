"""Copies of whole cache pages: forks of sequences and swaps to the host."""

from pallas_kernels.page_copy.api import copy_pages, gather_pages, scatter_pages

__all__ = ["copy_pages", "gather_pages", "scatter_pages"]
