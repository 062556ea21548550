"""Products with weights in 8 and 4 bits: of float activations, or of activations quantized a token at a time."""

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, dequantize_weight, quantize_weight

__all__ = ["QuantizedWeight", "dequantize_weight", "quantize_weight", "quantized_matmul"]
