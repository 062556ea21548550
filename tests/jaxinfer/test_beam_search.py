"""Beam search through the engine against an exhaustive one: every continuation of every beam, from full forward passes."""

import numpy as np
import pytest

from jaxinfer.llm import LLM
from jaxinfer.sampling.beam import BeamSearch, BeamSearchParams
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.conftest import MAX_LEN

PROMPTS = [np.random.default_rng(seed).integers(3, 320, n).tolist() for seed, n in ((1, 11), (2, 22), (3, 5))]
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": MAX_LEN, "page_size": 4}


@pytest.fixture(scope="module")
def beams(model):
    """An engine with pages of four tokens: beams part in the middle of them."""
    return LLM(model, compile_cache=False, **OPTIONS)


def exhaustive(naive, prompt, params, stops):
    """Beam search as it is defined, over all W * V continuations of a step; returns (tokens, log-probability)."""
    W, penalty = params.beam_width, params.length_penalty
    running, finished = [([], 0.0)], []
    for length in range(1, params.max_tokens + 1):
        every = []
        for tokens, total in running:
            _, _, [logprobs] = naive.run(prompt + tokens, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
            every += [(total + float(logprobs[token]), [*tokens, token]) for token in range(len(logprobs))]
        every.sort(key=lambda one: -one[0])
        ends = [length == params.max_tokens or tokens[-1] in stops for _, tokens in every]
        finished += [(total / length**penalty, total, tokens) for (total, tokens), end in zip(every[:W], ends) if end]
        finished = sorted(finished, key=lambda one: -one[0])[:W]
        running = [(tokens, total) for (total, tokens), end in zip(every, ends) if not end][:W]
        if not running or (len(finished) == W and params.early_stopping is True):
            break
        far = params.max_tokens if params.early_stopping == "never" and penalty > 0 else length
        if len(finished) == W and running[0][1] / far**penalty <= finished[-1][0]:
            break
    return [(tokens, total) for _, total, tokens in finished]


def check(output, wanted):
    assert [completion.token_ids for completion in output.outputs] == [tokens for tokens, _ in wanted]
    assert [c.cumulative_logprob for c in output.outputs] == pytest.approx([total for _, total in wanted], abs=1e-3)


STOPS = tuple(range(3, 320, 6))  # many, so that beams end early


@pytest.mark.parametrize(
    "options",
    [
        {"beam_width": 3, "length_penalty": 0.0, "ignore_eos": True},
        {"beam_width": 4, "early_stopping": True},
        {"beam_width": 3, "length_penalty": 2.0, "early_stopping": "never"},
        {"beam_width": 1, "length_penalty": -1.0},
    ],
)
def test_equals_an_exhaustive_search(beams, naive, options):
    params = BeamSearchParams(max_tokens=9, **options)
    stops = set() if params.ignore_eos else set(beams.tokenizer.eos_token_ids)
    outputs = beams.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs):
        check(output, exhaustive(naive, prompt, params, stops))
    assert beams.stats().num_used_pages == 0
