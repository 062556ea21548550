"""Meshes and logical axis rules: where parameters live."""

from sharding.mesh import make_mesh
from sharding.rules import AxisRules
from sharding.trees import tree_shardings

__all__ = ["AxisRules", "make_mesh", "tree_shardings"]
