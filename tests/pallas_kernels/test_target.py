import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec, use_abstract_mesh

from pallas_kernels.target import require_hopper, require_tpu
from tests.pallas_kernels.targets import DEVICES


@pytest.mark.parametrize(("device", "require"), [("h200", require_hopper), ("v5e", require_tpu)])
def test_a_kernel_on_a_mesh_belongs_inside_shard_map(device, require):
    mesh = AbstractMesh((1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2, abstract_device=DEVICES[device])

    def kernel(x):
        require(False)
        return x

    with use_abstract_mesh(mesh):
        with pytest.raises(NotImplementedError, match=r"on a mesh of \{'model': 4\} must be called inside shard_map"):
            kernel(0)
        inside = jax.shard_map(kernel, in_specs=PartitionSpec("model"), out_specs=PartitionSpec("model"))
        assert jax.eval_shape(inside, jax.ShapeDtypeStruct((8,), "float32")).shape == (8,)
