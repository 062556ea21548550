"""Copies of whole cache pages: forks of sequences and swaps to the host."""
