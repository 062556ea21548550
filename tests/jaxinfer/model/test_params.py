"""The parameter tree is a table: the modules must declare the same."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.model.params import abstract_params, random_params


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}])
def test_the_table_is_what_the_modules_declare(model, tied, options):
    config = dataclasses.replace(model.config, tie_word_embeddings=tied, **options)
    table, axes = abstract_params(config, jnp.bfloat16)
    declared = jax.eval_shape(lambda: random_params(config, jnp.bfloat16))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), table) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), declared
    )
    jax.tree.map(lambda leaf, names: pytest.fail("an axis each") if len(names) != leaf.ndim else None, table, axes)
