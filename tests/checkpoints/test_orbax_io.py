import gc
import json
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import orbax_io
from checkpoints.trees import flatten

pytest.importorskip("orbax.checkpoint")

CONFIG = {"num_layers": 1, "name": "böß", "rope_theta": 1e4}


@pytest.fixture
def params(rng):
    return {
        "embed": {"weight": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)},
        "layers_0": {"q": {"weight": jnp.asarray(rng.standard_normal((8, 8)), jnp.bfloat16)}},
        "steps": jnp.arange(3),
    }


@pytest.fixture
def abstract(params):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


@pytest.fixture
def saved(tmp_path, params):
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    orbax_io.save(tmp_path / "deep" / "model", params, CONFIG, [tokenizer])
    return tmp_path / "deep" / "model"


def test_round_trip(saved, params, abstract):
    assert orbax_io.is_checkpoint(saved)
    assert orbax_io.read_config(saved) == CONFIG
    assert (saved / "tokenizer.json").read_text() == "{}"
    assert [entry.name for entry in saved.parent.iterdir()] == ["model"]  # no temporary left
    tree = orbax_io.restore(saved, abstract)
    assert jax.tree.structure(tree) == jax.tree.structure(params)
    for path, array in flatten(tree).items():
        assert array.dtype == flatten(params)[path].dtype
        assert array.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(array, flatten(params)[path])


def test_restores_to_other_shardings_and_dtypes(saved, params, abstract):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("model"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.P())
    abstract["embed"]["weight"] = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    shardings = {"embed": {"weight": rows}, "layers_0": {"q": {"weight": rows}}, "steps": everywhere}
    tree = orbax_io.restore(saved, abstract, shardings)
    assert tree["embed"]["weight"].sharding == rows
    assert tree["steps"].sharding == everywhere
    np.testing.assert_array_equal(tree["embed"]["weight"], params["embed"]["weight"].astype(jnp.bfloat16))
    assert orbax_io.restore(saved, abstract, everywhere)["embed"]["weight"].sharding == everywhere
    with pytest.raises(ValueError, match="different leaves: embed/weight"):
        orbax_io.restore(saved, abstract, {"layers_0": {"q": {"weight": rows}}, "steps": rows})


def test_sharded_arrays_restore_on_one_device(tmp_path, params, abstract):
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    weight = jax.device_put(params["embed"]["weight"], jax.sharding.NamedSharding(mesh, jax.P("model")))
    orbax_io.save(tmp_path / "model", params | {"embed": {"weight": weight}}, CONFIG)
    assert orbax_io.restore(tmp_path / "model", abstract)["embed"]["weight"].devices() == {jax.devices()[0]}


def test_other_models_are_refused(saved, abstract):
    abstract["head"] = abstract.pop("steps")
    abstract["embed"]["weight"] = jax.ShapeDtypeStruct((16, 9), jnp.float32)
    with pytest.raises(ValueError, match="does not fit the model") as caught:
        orbax_io.restore(saved, abstract)
    assert "1 leaves that the checkpoint lacks: head" in str(caught.value)
    assert "1 leaves that the model does not have: steps" in str(caught.value)
    assert "1 wrong shapes: embed/weight: wanted [16, 9], got [16, 8]" in str(caught.value)


def test_foreign_directories(tmp_path, abstract):
    assert not orbax_io.is_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="wanted a directory saved by jaxinfer"):
        orbax_io.restore(tmp_path, abstract)
    for content, message in [
        ("{", "not JSON"),
        ("[]", 'wanted "format": "jaxinfer"'),
        ('{"format": "other"}', 'wanted "format": "jaxinfer"'),
        ('{"format": "jaxinfer", "version": 2, "config": {}}', "wanted version 1 .*, got version 2; upgrade"),
        ('{"format": "jaxinfer", "version": 1}', "with a config"),
    ]:
        (tmp_path / "jaxinfer.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            orbax_io.restore(tmp_path, abstract)
    (tmp_path / "jaxinfer.json").write_text(json.dumps({"format": "jaxinfer", "version": 1, "config": {}}))
    with pytest.raises(ValueError, match="damaged"):
        orbax_io.restore(tmp_path, abstract)


def restore_or_refuse(saved, abstract, params) -> bool:
    """True when it was refused; a model that comes back must be the right one."""
    try:
        tree = orbax_io.restore(saved, abstract)
    except ValueError as error:
        return "damaged" in str(error) or "does not fit" in str(error)
    for path, array in flatten(tree).items():
        np.testing.assert_array_equal(array, flatten(params)[path])
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves its coroutines
def test_every_file_removed_cut_or_changed(saved, abstract, params):
    files = [file for file in (saved / "params").rglob("*") if file.is_file()]
    refused = 0
    for file in files:
        whole = file.read_bytes()
        changed = bytes(byte ^ 0x55 for byte in whole)
        file.unlink()
        refused += restore_or_refuse(saved, abstract, params)
        for content in (b"", whole[: len(whole) // 2], changed):
            file.write_bytes(content)
            refused += restore_or_refuse(saved, abstract, params)
        file.write_bytes(whole)
    assert refused >= 8
    assert not restore_or_refuse(saved, abstract, params)
    for _ in range(5):  # those coroutines complain here, not in a later test; threads of Orbax hold some for a while
        gc.collect()
        time.sleep(0.1)


def interrupt(*_):
    raise KeyboardInterrupt


def test_saving_refuses_and_leaves_nothing(tmp_path, params, monkeypatch):
    target = tmp_path / "out" / "model"
    with pytest.raises(ValueError, match="config must be plain JSON"):
        orbax_io.save(target, params, {"dtype": jnp.float32})
    with pytest.raises(ValueError, match="wanted a file to copy"):
        orbax_io.save(target, params, CONFIG, [tmp_path / "tokenizer.json"])
    with pytest.raises(ValueError, match=r"the name 'jaxinfer\.json' is taken"):
        orbax_io.save(target, params, CONFIG, [tmp_path / "jaxinfer.json"])
    with monkeypatch.context() as patch:
        patch.setattr(orbax_io, "os", types.SimpleNamespace(rename=interrupt))  # Orbax renames too
        with pytest.raises(KeyboardInterrupt):
            orbax_io.save(target, params, CONFIG)
    assert list(target.parent.iterdir()) == []
    orbax_io.save(target, params, CONFIG)
    with pytest.raises(ValueError, match="exists already"):
        orbax_io.save(target, params, CONFIG)


def test_missing_orbax_says_what_to_install(tmp_path, params, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ValueError, match=r'pip install "jaxinfer\[orbax\]"'):
        orbax_io.save(tmp_path / "model", params, CONFIG)
