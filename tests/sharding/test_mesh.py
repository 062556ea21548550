import jax
import pytest
from jax.sharding import AxisType

from sharding import make_mesh


def test_axes_and_devices():
    mesh = make_mesh(data=4, model=2)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert mesh.devices.size == 8
    assert dict(make_mesh().shape) == {"data": 1, "model": 1}


def test_chosen_devices():
    devices = jax.devices()[4:]
    assert set(make_mesh(model=2, devices=devices).devices.flat) == set(devices[:2])


@pytest.mark.parametrize("sizes", [{"model": 16}, {"data": 3, "model": 3}, {"data": 0}, {"data": -1, "model": -1}])
def test_refuses(sizes):
    data, model = sizes.get("data", 1), sizes.get("model", 1)
    with pytest.raises(ValueError, match=f"data={data} x model={model}"):
        make_mesh(**sizes)
