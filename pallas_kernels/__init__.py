"""Attention, cache and matrix kernels for inference: one operation a folder, importable without jaxinfer.

    from pallas_kernels.paged_attention import ragged_paged_attention

Every folder has the same files: `api.py` (arguments, checks, dispatch), `reference.py` (plain jnp: the one semantic
that every backend is tested against), one file per backend (`xla.py`, `mosaic_gpu*.py` for Hopper, `mosaic_tpu*.py`),
`tiles.py` (tile sizes with their reasons) and `specs.py` (named cases for tests, compile checks and benchmarks).
Backends are imported when they are used.
"""
