"""Products with weights in 4 to 8 bits: of float activations, or of activations quantized as they come."""

from pallas_kernels.quantized_matmul.api import quantized_matmul, quantized_matmuls
from pallas_kernels.quantized_matmul.cpu_gguf import repack_gguf
from pallas_kernels.quantized_matmul.cpu_packing import pack_cpu, quantize_cpu_weight
from pallas_kernels.quantized_matmul.cpu_weights import CpuWeight, dequantize_cpu_weight, take_rows, unpack_codes
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, dequantize_weight, quantize_weight

__all__ = [
    "CpuWeight",
    "QuantizedWeight",
    "dequantize_cpu_weight",
    "dequantize_weight",
    "pack_cpu",
    "quantize_cpu_weight",
    "quantize_weight",
    "quantized_matmul",
    "quantized_matmuls",
    "repack_gguf",
    "take_rows",
    "unpack_codes",
]
