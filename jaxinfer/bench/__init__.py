"""Measuring: workloads, latency metrics and reports, the same for us and for peers. Imports no jax."""
