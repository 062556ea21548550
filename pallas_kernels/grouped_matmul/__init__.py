"""Rows sorted by group, each times the matrix of its group (mixture of experts)."""
