"""Exact attention over contiguous keys."""

from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.flash_attention.float8 import Float8Attention, quantize_for_flash

__all__ = ["Float8Attention", "flash_attention", "quantize_for_flash"]
