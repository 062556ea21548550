"""Strict settings for every test, made before jax starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(  # eight devices, and quick compilation: the tests compile far more than they compute
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8"
    + (" --xla_backend_optimization_level=0" * (os.environ["JAX_PLATFORMS"] == "cpu")),
)

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("default")


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(0)
