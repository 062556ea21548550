"""The sections of `scripts/gpu_check.py`: numerics, roofs, attention, matrix products, and the whole engine.

A section is a list of items (name, function of no arguments that returns plain data). They need jax, flax, numpy and
jaxtyping, no tokenizer and no file, so that they run where nothing can be installed.
"""
