"""Accuracy figures on the tiny model, against the engine's own log-probabilities and NumPy."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer.bench.accuracy import Passage, compare, hidden_states, windows
from jaxinfer.bench.modes import parse_mode
from jaxinfer.model.decoder import head_logits
from jaxinfer.sampling.params import SamplingParams

PASSAGES = [Passage([5 + (7 * i) % 60 for i in range(65)]), Passage(list(range(5, 45)), first=30)]


@pytest.fixture(scope="module")
def hidden(llm):
    return hidden_states(llm.engine, PASSAGES)  # in chunks of 32 tokens, the last of one token


def test_perplexity_is_that_of_the_engines_prompt_logprobs(llm, model, hidden):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    losses = []
    for passage in PASSAGES:
        [output] = llm.generate(passage.token_ids, params)
        entries = zip(output.prompt_logprobs, passage.token_ids)
        losses += [-entry[token].logprob for entry, token in list(entries)[passage.first :]]
    found = compare(model, hidden, model, hidden, PASSAGES)
    assert found.positions == len(losses) == 64 + 10
    assert found.perplexity == found.reference_perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert (found.top1, found.kl, found.max_error, found.rms) == (1, 0, 0, 0)
    assert found.min_cosine == pytest.approx(1, abs=1e-6)


def test_differences_of_logits_are_those_numpy_finds(model, hidden):
    params = jax.tree.map(lambda x: x * 1.1, model.params)
    other = dataclasses.replace(model, params=params)
    a, b = (
        np.asarray(head_logits(model.decoder, each.params, np.concatenate(hidden)), np.float64)
        for each in (model, other)
    )
    found = compare(model, hidden, other, hidden, PASSAGES)
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (a, b))
    assert found.max_error == pytest.approx(np.abs(a - b).max(), rel=1e-4)
    assert found.rms == pytest.approx(np.sqrt(((a - b) ** 2).mean()), rel=1e-4)
    assert found.min_cosine == pytest.approx(cosine.min(), abs=1e-6)
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-3, abs=1e-7)
    assert found.top1 == (a.argmax(1) == b.argmax(1)).mean()
    assert found.perplexity_change == pytest.approx(found.perplexity / found.reference_perplexity - 1)


def test_a_text_is_cut_into_whole_windows():
    assert windows(range(10), 4, 100) == [Passage([0, 1, 2, 3]), Passage([4, 5, 6, 7])]
    assert windows(range(10), 4, 7) == [Passage([0, 1, 2, 3])]
    with pytest.raises(ValueError, match="the text has 3 tokens"):
        windows(range(3), 4, 100)


def test_a_mode_names_options_of_load_and_of_the_engine():
    assert parse_mode("") == {}
    assert parse_mode("quantize=int8, max_num_batched_tokens=64,async_scheduling=false") == {
        "quantize": "int8", "max_num_batched_tokens": 64, "async_scheduling": False,
    }  # fmt: skip
    assert parse_mode("kv_dtype=int8,bfloat16,page_size=32") == {"kv_dtype": "int8,bfloat16", "page_size": 32}
    for wrong in ("quantise=int8", "quantize", "quantize=", "dtype=float32,dtype=float16"):
        with pytest.raises(ValueError, match=f"dtype, quantize, .*; got '{wrong}'"):
            parse_mode(wrong)
