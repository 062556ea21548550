import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.sampling.beam import BeamSearch, BeamSearchParams
from tests.beams import exhaustive

V = 12


@given(
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 7),
    penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early=st.sampled_from([True, False, "never"]),
    stops=st.sets(st.integers(0, V - 1), max_size=4),
    seed=st.integers(0, 1000),
)
def test_equals_an_exhaustive_search(width, max_tokens, penalty, early, stops, seed):
    """On a made-up language in which the next token depends on the last and on how many there are."""
    scores = np.random.default_rng(seed).normal(0, 1.5, (max_tokens, V, V))
    table = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, length_penalty=penalty, early_stopping=early)

    def logprobs(tokens):
        return table[len(tokens), tokens[-1] if tokens else 0]

    search = BeamSearch(params, max_tokens, frozenset(stops))
    while not search.is_done:
        candidates = []
        for beam in search.running:
            row = logprobs(beam.token_ids)
            best = np.argsort(-row)[: search.num_candidates]
            candidates.append((best.tolist(), row[best].tolist()))
        previous = search.running
        search.advance(candidates)
        for beam in search.running:
            assert beam.token_ids[:-1] == previous[beam.parent].token_ids
    wanted = exhaustive(logprobs, params, stops)
    assert [beam.token_ids for beam in search.finished] == [tokens for tokens, _ in wanted]
    assert [beam.logprob for beam in search.finished] == pytest.approx([total for _, total in wanted])


@pytest.mark.parametrize(("early", "found"), [(True, [0]), (False, [0]), ("never", [1, 1, 1, 1])])
def test_never_waits_for_what_a_long_continuation_could_still_score(early, found):
    """Token 0 ends at once with -0.5; token 1 begins with -1 and is then certain: -1 / 4**2 is better in the end."""
    params = BeamSearchParams(beam_width=1, max_tokens=4, length_penalty=2.0, early_stopping=early)
    search = BeamSearch(params, 4, frozenset([0]))
    search.advance([([0, 1], [-0.5, -1.0])])
    while not search.is_done:
        search.advance([([1, 0], [0.0, -50.0])])
    assert [beam.token_ids for beam in search.finished] == [found]
