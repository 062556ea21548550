"""The OpenAI-compatible server over `AsyncEngine`."""
