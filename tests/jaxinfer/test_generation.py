"""The pure function `generate` on the tiny model: alone, ragged, sampled, traced, and on a mesh."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer import generation
from jaxinfer.generation import generate
from jaxinfer.loading import load
from sharding import make_mesh
from tests.helpers import PagedRow

MODEL = Path("tests/golden/models/tiny-chat")
GOLDEN = dict(np.load(MODEL / "golden.npz"))
B, T, N = 4, 70, 24  # of two rows, one's prompt and the other's answer go on to a second page of 64 tokens
PROMPT_LENS = np.array([len(GOLDEN["token_ids"]), 70, 47, 1], np.int32)
TOKENS = np.random.default_rng(0).integers(3, 320, (B, T), np.int32)
TOKENS[0, : PROMPT_LENS[0]] = GOLDEN["token_ids"]


@pytest.fixture(scope="module")
def model():
    return load(MODEL, dtype="float32")


@pytest.fixture(scope="module")
def run(model):
    """`generate` with all that may be traced traced: one compilation for most tests."""

    @jax.jit
    def traced(params, tokens, prompt_lens, key, options):
        return generate(model.decoder, params, tokens, max_new_tokens=N, prompt_lens=prompt_lens, key=key, **options)

    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}

    def call(tokens=TOKENS, prompt_lens=PROMPT_LENS, seed=0, **options):
        rows = {
            name: np.broadcast_to(np.asarray(value, np.int32 if name == "top_k" else np.float32), B)
            for name, value in (defaults | options).items()
        }
        return traced(model.params, tokens, prompt_lens, jax.random.key(seed), rows)

    return call


@pytest.fixture(scope="module")
def greedy(run):
    return run()


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_greedy_rows_equal_each_row_alone(model, greedy):
    assert greedy.token_ids[0].tolist() == GOLDEN["greedy"].tolist()
    for row in range(B):
        alone = PagedRow(model.decoder, model.params)
        logits, tokens = alone.feed_in_chunks(TOKENS[row, : PROMPT_LENS[row]], 64)[-1], []
        for i in range(N):
            tokens.append(int(logits.argmax()))
            assert greedy.logprobs[row, i] == pytest.approx(log_softmax(logits)[tokens[-1]], abs=1e-4)
            logits = alone.feed(tokens[-1:])[0]
        assert greedy.token_ids[row].tolist() == tokens
    assert greedy.lengths.tolist() == [N] * B


def test_sampling_is_decided_by_the_key(run):
    same = functools.partial(run, np.tile(TOKENS[1], (B, 1)), np.full(B, T, np.int32), temperature=1)
    first, again, other = same(), same(), same(seed=1)
    np.testing.assert_array_equal(first.token_ids, again.token_ids)
    np.testing.assert_array_equal(first.logprobs, again.logprobs)
    for a, b in [(first.token_ids[i], first.token_ids[j]) for i in range(B) for j in range(i)]:
        assert a.tolist() != b.tolist()  # one prompt, four rows
    assert (first.token_ids != other.token_ids).any(axis=1).all()


def test_every_step_draws_anew(run):
    out = run(temperature=1000)  # nearly uniform over 320 tokens
    assert min(len(set(row.tolist())) for row in np.asarray(out.token_ids)) > N - 6


def test_logprobs_of_sampled_tokens_are_the_models(model, run):
    out = run(temperature=1.7, top_p=0.9, seed=3)
    alone = PagedRow(model.decoder, model.params)
    sampled, n = np.asarray(out.token_ids[2]), PROMPT_LENS[2]
    logits = alone.feed_in_chunks(np.concatenate([TOKENS[2, :n], sampled]), 64)[n - 1 : -1]
    np.testing.assert_allclose(out.logprobs[2], log_softmax(logits)[np.arange(N), sampled], atol=1e-4)


def test_parameters_may_differ_by_row(run, greedy):
    same = [False] * B
    for options in (
        {"temperature": [0, 1, 0, 1]},
        {"temperature": 1, "top_k": [1, 0, 1, 0]},
        {"temperature": 1, "top_p": [1e-6, 1, 1e-6, 1]},
        {"temperature": 1, "min_p": [1, 0, 1, 0]},
    ):
        out = run(**options)
        same = [out.token_ids[i].tolist() == greedy.token_ids[i].tolist() for i in range(B)]
        assert same == [True, False, True, False], options
    typical, plain = run(temperature=1, typical_p=[1, 0.2, 1, 1]), run(temperature=1)
    assert (typical.token_ids != plain.token_ids).any(axis=1).tolist() == [False, True, False, False]


def test_stop_tokens_end_rows_and_then_the_loop(model, greedy, monkeypatch):
    """Wanted is what greedy says, cut after the first stop token; passes of the loop are counted."""
    tokens = np.asarray(greedy.token_ids)
    stops = (2, int(tokens[1, 6]), int(tokens[2, 3]), int(tokens[3, 9]))
    wanted = [min(row.tolist().index(stop) for stop in stops if stop in row) + 1 for row in tokens]
    assert max(wanted) < N - 3
    assert len(set(wanted)) > 2
    passes, append = [], generation._append

    def counted(*args):
        jax.debug.callback(lambda: passes.append(1))
        return append(*args)

    monkeypatch.setattr(generation, "_append", counted)
    stopping = functools.partial(
        generate, model.decoder, max_new_tokens=N, stop_token_ids=stops, pad_token_id=-7, prompt_lens=PROMPT_LENS
    )
    out = jax.jit(stopping)(model.params, TOKENS)
    jax.effects_barrier()
    assert out.lengths.tolist() == wanted
    assert len(passes) == max(wanted)
    for row, length in enumerate(wanted):
        assert out.token_ids[row].tolist() == tokens[row, :length].tolist() + [-7] * (N - length)
        np.testing.assert_allclose(out.logprobs[row, :length], greedy.logprobs[row, :length], atol=1e-5)
        assert not out.logprobs[row, length:].any()


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_a_jitted_loop_under_vmap(model, compiles):
    """Reinforcement learning: generation, then an update of the parameters, all in one program."""
    prompts, temperature = np.tile(GOLDEN["token_ids"], (2, 1)), jnp.array([0.0, 1.0])

    def rollouts(params, key):
        def step(params, key):
            sample = functools.partial(generate, model.decoder, params, max_new_tokens=5)
            keys = jax.random.split(key, len(prompts))
            out = jax.vmap(lambda row, key, t: sample(row[None], key=key, temperature=t))(prompts, keys, temperature)
            return jax.tree.map(lambda p: p * 1.5, params), out

        return jax.lax.scan(step, params, jax.random.split(key, 2))

    run = jax.jit(rollouts) if compiles else functools.partial(jax.eval_shape, rollouts)
    _, out = run(model.params, jax.random.key(0))
    assert out.token_ids.shape == (2, 2, 1, 5)  # [update, prompt, B, tokens]
    if not compiles:
        return
    assert out.token_ids[0, 0, 0].tolist() == GOLDEN["greedy"][:5].tolist()
    assert out.token_ids[0, 1, 0].tolist() != GOLDEN["greedy"][:5].tolist()
    logits = PagedRow(model.decoder, jax.tree.map(lambda p: p * 1.5, model.params)).feed(prompts[0])[-1]
    assert out.token_ids[1, 0, 0, 0] == logits.argmax()  # by the updated parameters
    assert out.logprobs[1, 0, 0, 0] == pytest.approx(log_softmax(logits).max(), abs=1e-4)


def test_shapes_without_computation(model):
    abstract = jax.eval_shape(lambda: model.params)
    out = jax.eval_shape(
        functools.partial(generate, model.decoder, max_new_tokens=N, temperature=0.5),
        abstract, jax.ShapeDtypeStruct((B, T), jnp.int32), key=jax.eval_shape(lambda: jax.random.key(0)),
    )  # fmt: skip
    assert (out.token_ids.shape, out.token_ids.dtype) == ((B, N), jnp.int32)
    assert (out.lengths.shape, out.logprobs.shape) == ((B,), (B, N))


def test_on_a_mesh_the_tokens_are_the_same(greedy):
    """Two replicas, each on two devices; rows are split over the replicas."""
    mesh = make_mesh(data=2, model=2)
    sharded = load(MODEL, dtype="float32", mesh=mesh)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    tokens, lens = jax.device_put((TOKENS, PROMPT_LENS), rows)
    run = jax.jit(
        lambda params, tokens, lens: generate(sharded.decoder, params, tokens, max_new_tokens=N, prompt_lens=lens)
    )
    out = run(sharded.params, tokens, lens)
    np.testing.assert_array_equal(out.token_ids, greedy.token_ids)
    np.testing.assert_allclose(out.logprobs, greedy.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(4, np.int32)}, r"tokens must be integers of shape \[B, T\] with T >= 1, got int32\[4\]"),
        ({"tokens": np.zeros((2, 4), np.float32)}, r"got float32\[2, 4\]"),
        ({"tokens": np.zeros((2, 0), np.int32)}, r"got int32\[2, 0\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": 253}, "4 prompt tokens and 253 new ones are more than the model's 256"),
        ({"temperature": 0.5}, "sampling needs a random key"),
        ({"temperature": jnp.zeros(2)}, "sampling needs a random key"),
        ({"temperature": -1.0, "key": jax.random.key(0)}, "temperature must be finite and at least 0, got -1"),
        ({"top_p": 1.5}, "top_p must be between 0 and 1, got 1.5"),
        ({"min_p": np.zeros(3)}, r"min_p must be one number or have shape \[B=2\], got shape \[3\]"),
        ({"prompt_lens": np.array([1, 2, 3])}, r"prompt_lens must have shape \[B=2\], got \[3\]"),
        ({"prompt_lens": np.array([0, 2])}, r"prompt_lens must be from 1 to T=4, got \[0, 2\]"),
        ({"prompt_lens": np.array([5, 2])}, r"prompt_lens must be from 1 to T=4, got \[5, 2\]"),
    ],
)
def test_refuses(model, change, message):
    arguments = {"tokens": np.zeros((2, 4), np.int32), "max_new_tokens": 2}
    with pytest.raises(ValueError, match=message):
        generate(model.decoder, model.params, **(arguments | change))
