import jax
import pytest
from jax.sharding import PartitionSpec

from sharding import AxisRules


def test_defaults_split_the_many_not_the_few():
    rules = AxisRules()
    assert rules.spec(("vocab", "embed")) == PartitionSpec("model", None)
    assert rules.spec(("heads", "embed")) == PartitionSpec("model", None)
    assert rules.spec(("embed", "mlp")) == PartitionSpec(None, "model")
    assert rules.spec(("kv_heads",)) == PartitionSpec("model")
    assert rules.spec(("head_dim",)) == PartitionSpec(None)
    assert rules.spec(()) == PartitionSpec()


def test_rules_can_be_changed():
    assert AxisRules(vocab=None, embed="data").spec(("vocab", "embed")) == PartitionSpec(None, "data")


def test_collision():
    with pytest.raises(ValueError, match=r"two dimensions of \('mlp', 'embed'\).*\['model', 'model'\]"):
        AxisRules(embed="model").spec(("mlp", "embed"))


def test_unknown_axis():
    with pytest.raises(ValueError, match=r"unknown logical axes \['hidden'\].*known are vocab, embed, heads, kv_heads"):
        AxisRules().spec(("hidden", "embed"))


def test_rules_are_hashable():
    assert jax.jit(lambda rules: 1.0, static_argnums=0)(AxisRules()) == 1.0
