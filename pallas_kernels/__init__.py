"""Attention and cache kernels, one folder an operation.

Every folder has the same files: `api.py` (arguments, checks, dispatch), `reference.py` (plain jnp: the one
semantic that every backend is tested against) and one file per backend.
"""

from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.paged_attention.api import ragged_paged_attention
from pallas_kernels.paged_attention.schedule import Schedule, make_schedule

__all__ = ["Schedule", "make_schedule", "ragged_paged_attention", "write_kv"]
