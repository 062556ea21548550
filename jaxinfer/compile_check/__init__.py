"""Compiles the engine's steps for devices that are not there, and says what they would cost.

`devices` and `model_shapes` are the tables, `plan` turns options into a request, `launch` runs the compilation in
another process (`__main__`, which uses `steps`, `topology` and `measure`), `roofline` and `report` turn its answer into
times and text. The other process imports no tokenizer and no checkpoint library, so that an environment with nothing
but jax, flax and a compiler plugin suffices.
"""
