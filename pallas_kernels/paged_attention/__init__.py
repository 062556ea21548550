"""Ragged attention over cache pages."""
