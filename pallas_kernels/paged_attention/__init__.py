"""Ragged attention over cache pages."""

from pallas_kernels.paged_attention.api import ragged_paged_attention
from pallas_kernels.paged_attention.schedule import Schedule, make_schedule

__all__ = ["Schedule", "make_schedule", "ragged_paged_attention"]
