"""Writes of new keys and values into cache pages."""
