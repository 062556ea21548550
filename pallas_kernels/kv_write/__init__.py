"""Writes of new keys and values into cache pages."""

from pallas_kernels.kv_write.api import write_full_pages, write_kv

__all__ = ["write_full_pages", "write_kv"]
