import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sharding import AxisRules, make_mesh, tree_shardings

ABSTRACT = {
    "layers_0": {"attention": {"q": {"weight": jax.ShapeDtypeStruct((8, 6), jnp.float32)}}},
    "final_norm": {"scale": jax.ShapeDtypeStruct((6,), jnp.float32)},
}
AXES = {
    "layers_0": {"attention": {"q": {"weight": ("heads", "embed")}}},
    "final_norm": {"scale": ("embed",)},
}


def test_one_sharding_a_leaf():
    mesh = make_mesh(data=2, model=4)
    tree = tree_shardings(ABSTRACT, AXES, mesh, AxisRules())
    assert tree["layers_0"]["attention"]["q"]["weight"] == NamedSharding(mesh, PartitionSpec("model", None))
    assert tree["final_norm"]["scale"] == NamedSharding(mesh, PartitionSpec(None))
    assert jax.tree.structure(tree) == jax.tree.structure(ABSTRACT)


def test_what_does_not_divide_is_named():
    message = (
        "dimension 'embed' of layers_0/attention/q/weight has size 6, which does not divide by the 4 devices of mesh "
        r"axis 'data'; use a smaller mesh, or AxisRules\(embed=None\)"
    )
    with pytest.raises(ValueError, match=message):
        tree_shardings({"layers_0": ABSTRACT["layers_0"]}, {"layers_0": AXES["layers_0"]}, make_mesh(data=4, model=2),
                       AxisRules(embed="data"))  # fmt: skip


def test_unknown_mesh_axis():
    message = "dimension 'heads' of layers_0/attention/q/weight: the mesh has no axis 'tensor', only data, model"
    with pytest.raises(ValueError, match=message):
        tree_shardings(ABSTRACT, AXES, make_mesh(), AxisRules(heads="tensor"))
