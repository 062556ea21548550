"""Products with one of several matrices for each row."""

from pallas_kernels.lora_matmul.api import lora_matmul

__all__ = ["lora_matmul"]
