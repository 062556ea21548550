"""Beam search through the engine against an exhaustive one: all continuations of every beam, from full passes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.beam_search import run_beam_search
from jaxinfer.llm import LLM
from jaxinfer.sampling.beam import BeamSearchParams
from jaxinfer.sampling.params import SamplingParams
from tests.beams import exhaustive
from tests.jaxinfer.conftest import MAX_LEN

PROMPTS = [np.random.default_rng(seed).integers(3, 320, n).tolist() for seed, n in ((1, 11), (2, 22), (3, 5))]
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": MAX_LEN, "page_size": 4}


@pytest.fixture(scope="module")
def beams(model):
    """An engine with pages of four tokens: beams part in the middle of them."""
    return LLM(model, compile_cache=False, **OPTIONS)


def naive_logprobs(naive, prompt):
    """What the naive loop says of the token after `prompt` and `tokens`."""

    def logprobs(tokens):
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        return naive.run([*prompt, *tokens], params)[2][0]

    return logprobs


def check(output, wanted):
    assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _ in wanted]
    assert [c.cumulative_logprob for c in output.outputs] == pytest.approx([total for _, total in wanted], abs=1e-3)


CASES = {
    "no penalty": {"beam_width": 3, "length_penalty": 0.0, "ignore_eos": True},
    "early": {"beam_width": 4, "early_stopping": True},
    "never": {"beam_width": 3, "length_penalty": 2.0, "early_stopping": "never"},
    "one beam": {"beam_width": 1, "length_penalty": -1.0},
}


@pytest.mark.parametrize("case", ["early", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES)])
def test_equals_an_exhaustive_search(beams, naive, case):
    """Without tokens that end a beam, then with some of those found ending others."""
    params = BeamSearchParams(max_tokens=6, **CASES[case])
    stops = set() if params.ignore_eos else set(beams.tokenizer.eos_token_ids)
    outputs = beams.beam_search(PROMPTS, params)
    if case != "early":
        for prompt, output in zip(PROMPTS, outputs):
            check(output, exhaustive(naive_logprobs(naive, prompt), params, stops))
    found = [completion.token_ids[-4:][i % 4] for output in outputs for i, completion in enumerate(output.outputs)]
    params = dataclasses.replace(params, stop_token_ids=found)
    ended = 0
    for prompt, output in zip(PROMPTS, beams.beam_search(PROMPTS, params)):
        check(output, exhaustive(naive_logprobs(naive, prompt), params, stops | set(found)))
        for completion in output.outputs:
            stopped = completion.token_ids[-1] in found
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert completion.text == beams.tokenizer.decode(completion.token_ids, continuation=True)
            ended += stopped and len(completion.token_ids) < 6
    assert ended or case == "never"  # with a penalty of 2, all that ends early is forgotten
    assert beams.stats().num_used_pages == 0
    assert not beams.engine.has_unfinished


def golden_cases():
    path = Path("tests/golden/beam_search.json")
    return json.loads(path.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["name"])
def test_equals_transformers(beams, case):
    """Sequences and scores of `generate(num_beams=...)`."""
    params = BeamSearchParams(**case["params"])
    [output] = beams.beam_search(case["prompt"], params)
    assert [completion.token_ids for completion in output.outputs] == case["sequences"]
    scores = [c.cumulative_logprob / len(c.token_ids) ** params.length_penalty for c in output.outputs]
    assert scores == pytest.approx(case["scores"], abs=1e-3)


def test_a_step_computes_one_token_a_beam_and_copies_only_open_pages(model):
    llm = LLM(model, compile_cache=False, **OPTIONS | {"page_size": 8})
    shared = []

    def step():
        llm._step()
        stats = llm.stats()
        shared.append(stats.num_shared_pages)
        llm.engine.scheduler.check_integrity()
        assert stats.num_used_pages <= 2 + 4 * 2  # two full pages of the prompt once; its rest and the new tokens: two

    params = BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True)
    [output] = run_beam_search(llm.engine, step, "x", [PROMPTS[1]], [params], [None])
    stats = llm.stats()
    forks = stats.num_prefill_tokens - len(PROMPTS[1])  # each computes the token that makes it differ
    assert 3 <= forks <= 8 * 3
    assert 3 <= stats.num_page_copies <= forks
    assert max(shared) >= 2
    assert output.metrics.finished > output.metrics.first_token > output.metrics.arrival


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 1 + MAX_LEN // 4},  # for one prompt at a time
        pytest.param({"prefix_cache": False, "async_scheduling": False}, marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 8}, marks=pytest.mark.slow),
    ],
    ids=["tight", "synchronous", "chunks"],
)
def test_limits_of_the_engine_change_nothing(model, beams, options):
    params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    wanted = beams.beam_search(PROMPTS, params)
    llm = LLM(model, compile_cache=False, **OPTIONS | options)
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    next(stream)  # runs beside the search, and may take its pages
    found = llm.beam_search(PROMPTS, params)
    assert [[c.token_ids for c in output.outputs] for output in found] == [
        [c.token_ids for c in output.outputs] for output in wanted
    ]
    stream.close()
    assert llm.stats().num_used_pages == 0


@pytest.mark.slow  # an engine to compile
def test_open_pages_are_computed_again_by_forks_only(model):
    """int4 pages: a fork begins at the last full page; the beams are those of a cache that packs a page at a time."""
    options = OPTIONS | {"page_size": 32, "kv_dtype": "int4"}
    llm = LLM(model, compile_cache=False, **options)
    prompt = np.random.default_rng(5).integers(3, 320, 60).tolist()
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    [output] = llm.beam_search([prompt], params)
    for completion in output.outputs:  # the log-probabilities are those that a request of its own sees
        whole = [*prompt, *completion.token_ids]
        scored = llm.generate(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
        total = sum(entry[token].logprob for token, entry in zip(completion.token_ids, scored[len(prompt) :]))
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)
    assert llm.stats().num_page_copies == 0


def test_an_error_leaves_nothing_behind(beams):
    def step():
        if len(beams.engine.scheduler.running) == 3:
            raise KeyboardInterrupt
        beams._step()

    params = BeamSearchParams(beam_width=3)
    with pytest.raises(KeyboardInterrupt):
        run_beam_search(beams.engine, step, "x", PROMPTS, [params] * 3, [None] * 3)
    assert not beams.engine.has_unfinished
    assert not beams.engine._groups
    assert beams.stats().num_used_pages == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 5}, "takes 5 slots and up to .* pages, the engine has 4 and .*; lower beam_width"),
        ({"beam_width": 5, "stop_token_ids": range(16)}, "must be at most 20 together, got 5 and 16"),
        ({"beam_width": 2, "stop_token_ids": [999]}, "stop_token_ids must hold ids below"),
    ],
)
def test_searches_that_do_not_fit_are_refused_before_any_runs(beams, options, message):
    before = beams.stats().num_steps
    with pytest.raises(ValueError, match=message):
        beams.beam_search(PROMPTS, [BeamSearchParams(beam_width=2)] * 2 + [BeamSearchParams(**options)])
    assert beams.stats().num_steps == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width must be between 1 and 20"),
        ({"beam_width": 2, "n": 3}, "n must be between 1 and 2"),
        ({"beam_width": 2, "early_stopping": 1}, 'early_stopping must be True, False or "never", got 1'),
        ({"beam_width": 2, "length_penalty": "long"}, "length_penalty must be a number"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_parameters_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**options)


def test_only_a_steered_request_at_rest_takes_a_token(beams):
    engine, params = beams.engine, SamplingParams(temperature=0, logprobs=3)
    engine.add_request("led", PROMPTS[0], params, is_steered=True)
    engine.add_request("free", PROMPTS[0], params)
    for request in ("led", "free"):
        with pytest.raises(RuntimeError, match="has no candidates: only a steered one at rest"):
            engine.extend(request, 5)
    with pytest.raises(ValueError, match="a fork of a steered request begins with a token, and no other does"):
        engine.fork("led", "x")
    with pytest.raises(ValueError, match="begins with a token, and no other does, got token=5"):
        engine.fork("free", "x", token=5)
    for request in ("led", "free"):
        engine.abort(request)
        engine.pop_output(request)
