"""The decoder, its configurations by family, and its parameters."""
