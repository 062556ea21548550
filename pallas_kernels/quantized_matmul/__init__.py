"""Products with weights in 8 and 4 bits: of float activations, or of activations quantized a token at a time."""
