import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import SamplingParams
from jaxinfer.sampling.rows import build_row, needs_row, needs_state, takes_best, uses_penalties
from jaxinfer.sampling.sampler import make_rows, sample
from jaxinfer.sampling.state import SamplerState, init_state, install_row
from tests.jaxinfer.sampling import reference

V = 1000
STOP = 2
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=20, top_p=0.9),
    SamplingParams(top_p=0.99, temperature=1.5, min_p=0.01),
    SamplingParams(typical_p=0.6, repetition_penalty=1.3),
    SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(logit_bias={3: 5.0}, allowed_token_ids=range(1, 100), min_tokens=4),
    SamplingParams(min_tokens=9),
]
PROMPTS = [list(range(i, i + 10)) for i in range(len(PARAMS))]
run = jax.jit(sample)


def install(state, slot, params, prompt=(), output=(), banned=()):
    row = build_row(params, prompt, output, [STOP], banned, V)
    return install_row(state, jnp.int32(slot), *map(jnp.asarray, row))


def fresh(num_rows=8):
    return init_state(num_rows, V, [STOP])


def one(params, *, slot=0, position=10, seed=0, prompt_len=10, num_rows=1):
    return make_rows(
        [params],
        slots=[slot],
        seeds=[seed],
        positions=[position],
        prompt_lens=[prompt_len],
        num_rows=num_rows,
    )


def eight_logits(seed=0):
    return (np.random.default_rng(seed).normal(size=(8, V)) * 3).astype(np.float32)


def test_mixture_equals_each_row_alone():
    x = eight_logits()
    state = fresh()
    outputs = [[5, 5, 6]] * 8
    for i, params in enumerate(PARAMS):
        state = install(state, i, params, PROMPTS[i], outputs[i])
    rows = make_rows(PARAMS, slots=range(8), seeds=range(8), positions=[13] * 8, prompt_lens=[10] * 8)
    tokens, new, _ = run(x, rows, state)
    for i, params in enumerate(PARAMS):
        alone = install(fresh(), 2, params, PROMPTS[i], outputs[i])
        padded = np.full((8, V), np.nan, np.float32)  # inactive rows may hold anything
        padded[0] = x[i]
        token, alone, _ = run(padded, one(params, slot=2, position=13, seed=i, num_rows=8), alone)
        assert token[0] == tokens[i], params
        np.testing.assert_array_equal(alone.output_counts[2], new.output_counts[i])
        assert (new.output_counts[i].sum() == 4) if uses_penalties(params) else (not new.output_counts[i].any())
        single, _, _ = run(x[i : i + 1], one(params, slot=i, position=13, seed=i), state)
        assert single[0] == tokens[i], params


def test_token_depends_on_seed_and_position_only():
    x = np.tile(eight_logits()[:1], (8, 1))
    draw = functools.partial(one, SamplingParams())
    token = run(x[:1], draw(seed=3, position=20), fresh())[0][0]
    rows = make_rows(
        [SamplingParams()] * 8,
        slots=range(7, -1, -1),
        seeds=[9, 9, 3, 3, 1, 3, 2**40, 3],
        positions=[20, 21, 20, 22, 20, 20, 20, 23],
        prompt_lens=[1] * 8,
    )
    tokens = np.asarray(run(x, rows, fresh())[0])
    assert tokens[2] == tokens[5] == token
    assert len(set(tokens.tolist())) >= 5


def test_greedy_ties_go_to_the_lowest_id():
    x = np.zeros((1, V), np.float32)
    x[0, [40, 30, 35]] = 1
    assert run(x, one(SamplingParams(temperature=0)), fresh())[0][0] == 30
    biased = SamplingParams(temperature=0, logit_bias={20: 1.0})
    assert run(x, one(biased), install(fresh(), 0, biased))[0][0] == 20


def test_rows_that_take_the_best_need_no_sampler():
    plain = SamplingParams(temperature=0, stop_token_ids=[4], ignore_eos=True, top_p=0.5)
    others = [
        SamplingParams(min_tokens=1, temperature=0),
        SamplingParams(temperature=0, logit_bias={1: 1.0}),
        *PARAMS[1:],
    ]
    assert takes_best(plain)
    assert not any(map(takes_best, others))
    x = eight_logits()
    x[3, 4] = x[6, 4] = 100
    rows = make_rows([plain] * 6, slots=range(6), seeds=range(6), positions=[13] * 6, prompt_lens=[10] * 6, num_rows=8)
    state = fresh()
    for i in range(6):
        state = install(state, i, plain)
    wanted, got = run(x, rows, state), jax.jit(functools.partial(sample, takes_best=True))(x, rows, state)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.asarray(got[2]).tolist() == [i == 3 for i in range(8)]


def test_inactive_rows_return_zero_and_leave_the_state_alone():
    params = SamplingParams(temperature=0, presence_penalty=1, stop_token_ids=[0])
    state = install(fresh(), 0, params)
    rows = one(params, num_rows=8)
    rows.active[0] = False
    tokens, new, stopped = run(eight_logits(), rows, state)
    assert np.asarray(tokens).tolist() == [0] * 8
    assert not np.asarray(stopped).any()
    for old, now in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(old, now)


def test_stop_tokens_stop_and_wait_for_min_tokens():
    x = np.zeros((1, V), np.float32)
    x[0, [STOP, 7, 8]] = [9, 8, 7]
    for params, position, want, ends in [
        (SamplingParams(temperature=0), 10, STOP, True),
        (SamplingParams(temperature=0, min_tokens=2), 11, 7, False),
        (SamplingParams(temperature=0, min_tokens=2), 12, STOP, True),
        (SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7]), 10, 8, False),
        (SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7], ignore_eos=True), 11, STOP, False),
        (SamplingParams(temperature=0, stop_token_ids=[7], logit_bias={7: 5}), 10, 7, True),
        (SamplingParams(temperature=0, allowed_token_ids=[STOP], min_tokens=2), 10, STOP, True),
    ]:
        state = install(fresh(), 0, params) if needs_row(params) else fresh()
        token, _, stopped = run(x, one(params, position=position), state)
        assert (int(token[0]), bool(stopped[0])) == (want, ends), params


def test_penalties_follow_the_counts_and_survive_preemption():
    params = SamplingParams(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=1.0)
    x = np.zeros((1, V), np.float32)
    x[0, :8] = 4
    prompt = [1, 2, 2]
    state = install(fresh(), 3, params, prompt)
    output = []
    for step in range(12):
        greedy = SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=1.0)
        counts = np.bincount(output, minlength=V)
        want = np.argmax(reference.penalize(x[0], counts, np.isin(np.arange(V), prompt), 1.4, 0.5, 1.0))
        assert run(x, one(greedy, slot=3, position=3 + step), state)[0][0] == want
        token, state, _ = run(x, one(params, slot=3, position=3 + step, seed=4, prompt_len=3), state)
        output.append(int(token[0]))
    again = install(fresh(), 3, params, prompt, output)
    for ran, installed in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(ran, installed)


def test_forbidden_tokens_are_not_drawn():
    x = eight_logits()[:1]
    params = SamplingParams(allowed_token_ids=[3, 4, 5], bad_words=["x"])
    state = install(fresh(), 0, params, banned=[4])
    tokens = {int(run(x, one(params, seed=seed), state)[0][0]) for seed in range(60)}
    assert tokens == {3, 5}
    two = eight_logits()[:2]
    mask = np.zeros((2, 32), np.uint32)
    mask[0, 9] = 1 << 5
    assert run(two, one(SamplingParams(), num_rows=2), fresh(), mask)[0][0] == 9 * 32 + 5
    everything = np.full((2, 32), 0xFFFFFFFF, np.uint32)
    for params in (SamplingParams(), SamplingParams(temperature=0)):
        token = run(two, one(params, num_rows=2), fresh(), everything)[0][0]
        assert token == run(x, one(params), fresh())[0][0]


@pytest.mark.parametrize("temperature", [0, 1])
def test_row_without_any_allowed_token_stops(temperature):
    rows = one(SamplingParams(temperature=temperature), num_rows=2)
    token, _, stopped = run(eight_logits()[:2], rows, fresh(), np.zeros((2, 32), np.uint32))
    assert np.asarray(token).tolist() == [0, 0]
    assert np.asarray(stopped).tolist() == [True, False]


def test_coldest_temperature_is_greedy():
    x = eight_logits()
    rows = make_rows(
        [SamplingParams(temperature=1e-5)] * 8,
        slots=range(8),
        seeds=range(8),
        positions=[1] * 8,
        prompt_lens=[1] * 8,
    )
    np.testing.assert_array_equal(run(x, rows, fresh())[0], x.argmax(1))


@jax.jit
def draw(x, rows, seeds):
    """A token for each of the seeds, with the parameters of `rows` otherwise."""
    return jax.vmap(lambda seed: sample(x[None], dataclasses.replace(rows, seeds=seed), None)[0][0])(seeds)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=9),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.2),
        SamplingParams(typical_p=0.7),
        SamplingParams(temperature=1.2, top_k=25, top_p=0.9, min_p=0.05),
    ],
    ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-min{p.min_p}-typ{p.typical_p}",
)
def test_draws_follow_the_distribution(params):
    x = (np.random.default_rng(1).normal(size=40) * 1.5).astype(np.float32)
    num = 20_000
    rows = make_rows([params], slots=[0], seeds=[0], positions=[5], prompt_lens=[5])
    seeds = np.stack([np.zeros(num, np.uint32), np.arange(num, dtype=np.uint32)], 1)[:, None]
    observed = np.bincount(np.asarray(draw(x, rows, seeds)), minlength=40)
    left = x / params.temperature
    for name in ("top_k", "top_p", "min_p", "typical_p"):
        left = np.where(getattr(reference, name)(left, getattr(params, name)), left, -np.inf)
    expected = reference.softmax(left) * num
    assert (observed[expected == 0] == 0).all()
    used = expected > 5
    chi_square = ((observed - expected)[used] ** 2 / expected[used]).sum()
    degrees = used.sum() - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)  # five standard deviations


def test_state_none_under_jit_vmap():
    x = eight_logits()
    rows = [one(SamplingParams(top_k=5), seed=i) for i in range(8)]
    stacked = jax.tree.map(lambda *a: np.stack(a), *rows)
    tokens, state, stopped = jax.jit(jax.vmap(lambda x, r: sample(x, r, None)))(x[:, None], stacked)
    assert state is None
    assert not np.asarray(stopped).any()
    for i in range(8):
        assert tokens[i, 0] == run(x[i : i + 1], rows[i], fresh())[0][0]


def test_needs():
    for params, row, state in [
        (SamplingParams(temperature=0, top_k=3, seed=1, min_tokens=3, logprobs=2), False, False),
        (SamplingParams(ignore_eos=True), True, False),
        (SamplingParams(stop_token_ids=[1]), True, False),
        (SamplingParams(bad_words=["a"]), True, True),
        (SamplingParams(logit_bias={1: 1}), True, True),
        (SamplingParams(allowed_token_ids=[1]), True, True),
        (SamplingParams(repetition_penalty=1.1), True, True),
        (SamplingParams(presence_penalty=0.1), True, True),
        (SamplingParams(frequency_penalty=-0.1), True, True),
    ]:
        assert (needs_row(params), needs_state(params)) == (row, state)


def test_initial_row_is_the_row_of_a_default_request():
    state = install(fresh(2), 1, SamplingParams(), prompt=[])
    for leaf in jax.tree.leaves(state):
        np.testing.assert_array_equal(leaf[0], leaf[1])


def test_wrong_arguments_are_refused():
    x = eight_logits()[:1]
    with pytest.raises(ValueError, match="logits must be float32, got bfloat16"):
        sample(jnp.asarray(x, jnp.bfloat16), one(SamplingParams()), None)
    with pytest.raises(ValueError, match=r"token_mask must have shape \(1, 32\), got \(1, 31\)"):
        sample(jnp.asarray(x), one(SamplingParams()), None, jnp.zeros((1, 31), jnp.uint32))


def test_install_row_donates():
    state = fresh()
    install(state, 0, SamplingParams())
    assert isinstance(state, SamplerState)
    assert state.output_counts.is_deleted()
