"""Reads and writes model weights: safetensors, GGUF and Orbax, and finds them by path or name.

Import the modules directly (`from checkpoints.load import load_tree`): only `load` and `orbax_io` need jax.
"""
