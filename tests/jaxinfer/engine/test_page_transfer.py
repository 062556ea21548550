"""Pages leave the device and come back bit for bit, in every precision and kind of host memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.fingerprint import fingerprint
from jaxinfer.engine.page_transfer import PageTransfer
from jaxinfer.engine.swap_cost import LATENCY, SwapCost
from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.kv_cache import KVCache


def random_pages(model, kv, page_size=32, num_pages=12):
    cache = KVCache.init(model.config, num_pages, page_size, kv, num_slots=1)
    rng = np.random.default_rng(3)

    def fill(leaf):
        return jnp.asarray(rng.integers(0, 100, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(fill, (cache.k_pages, cache.v_pages))


def assert_equal(a, b, pages):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[:, pages], np.asarray(y)[:, pages])


@pytest.mark.parametrize("kv_dtype", ["float32", "int8,float8", "int4,int2"])
@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
def test_pages_come_back_as_they_were(model, kv_dtype, memory_kind):
    kv = KVSpec.parse(kv_dtype, "float32")
    pages = random_pages(model, kv)
    transfer = PageTransfer(pages, memory_kind)
    assert transfer.page_bytes == kv.page_bytes(model.config, 32)
    before = jax.tree.map(np.asarray, pages)
    source = [3, 1, 11, 2, 5, 4, 9, 10, 7]  # one more than goes in one operation
    saved = transfer.save(pages, source)
    assert {array.sharding.memory_kind for page in saved for array in page} == {memory_kind or "device"}
    packed = [transfer.pack(page) for page in saved]
    assert {len(data) for data in packed} == {transfer.page_bytes}
    saved[4:] = [transfer.unpack(data) for data in packed[4:]]
    target = [8, 9, 1, 7, 6, 2, 4, 3, 5]
    staged = [transfer.upload(page) for page in saved]
    transfer.wait(staged[0])
    assert transfer.is_ready(staged[0])
    after = transfer.load(pages, staged, target)
    for a, b in zip(source, target):
        assert_equal(jax.tree.map(lambda x, a=a: x[:, [a]], before), jax.tree.map(lambda x, b=b: x[:, [b]], after), [0])
    assert_equal(before, after, [10, 11])
    with pytest.raises(ValueError, match="a page has"):
        transfer.unpack(packed[0][:-1])


def test_a_fingerprint_tells_weights_options_and_precisions_apart(model):
    kv = KVSpec("float32", "float32")
    layers = jax.tree.map(lambda x: x, model.params)
    flat, tree = jax.tree.flatten(layers)
    nudged = jax.tree.unflatten(tree, [flat[0].at[(1,) * flat[0].ndim].multiply(1.001), *flat[1:]])
    place = next(i for i, leaf in enumerate(flat) if leaf.ndim == 2)
    swapped = [*flat]
    swapped[place] = flat[place][::-1]
    config = dataclasses.replace(model.config, rope_theta=model.config.rope_theta + 1)
    models = [
        model,
        dataclasses.replace(model, params=nudged),
        dataclasses.replace(model, params=jax.tree.unflatten(tree, swapped)),
        dataclasses.replace(model, spec=dataclasses.replace(model.spec, config=config)),
        dataclasses.replace(model, spec=dataclasses.replace(model.spec, activations="int8")),
        dataclasses.replace(model, spec=dataclasses.replace(model.spec, config=model.config.streaming(4, 32))),
    ]
    prints = [fingerprint(m.spec, m.params, kv, 16) for m in models]
    prints += [fingerprint(model.spec, model.params, *other) for other in ((kv, 32), (KVSpec("float32", "int8"), 16))]
    assert len(set(prints)) == 8
    assert fingerprint(dataclasses.replace(model.spec, implementation="xla"), model.params, kv, 16) == prints[0]


def test_the_cost_of_a_swap():
    cost = SwapCost()
    assert cost.is_swap_cheaper(1 << 40, 1)  # nothing is known
    cost.record_step(100, 0.1)
    assert cost.is_swap_cheaper(1 << 40, 1)
    assert cost.tokens_per_s == pytest.approx(1000)
    cost.record_step(200, 0.1)
    assert cost.tokens_per_s == pytest.approx(1100)
    cost = SwapCost(bytes_per_s=1e9, tokens_per_s=1000)
    assert cost.is_swap_cheaper(10**6, 16)  # 1 ms and the latency, against 16 ms
    assert not cost.is_swap_cheaper(10**6, int(1000 * LATENCY))
    assert not cost.is_swap_cheaper(10**8, 16)
