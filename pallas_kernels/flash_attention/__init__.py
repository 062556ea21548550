"""Exact attention over contiguous keys."""
