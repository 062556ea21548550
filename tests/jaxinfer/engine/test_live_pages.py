"""Which pages are alive, counted token by token; and the memory that is planned for them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.live_pages import LivePages
from jaxinfer.engine.memory import plan_pages
from jaxinfer.kv_spec import KVSpec

MODEL = ModelConfig("mistral", 100, 64, 128, 2, 4, 2, 16, 1 << 15, 1e-5, 1e4, layer_windows=(4096, 4096))
F32 = KVSpec("float32", "float32")
RULES = st.builds(
    LivePages, page_size=st.sampled_from([1, 2, 5, 16]), window=st.integers(1, 40), sinks=st.integers(0, 20),
    step_tokens=st.integers(1, 30),
)  # fmt: skip


def pages_seen(rule, position):
    """Pages with a key that the token at `position` sees, and those of the sinks."""
    recent = range(max(0, position - rule.window + 1), position + 1)
    return {i // rule.page_size for i in recent} | set(range(rule.num_sink_pages))


@given(rule=RULES, position=st.integers(0, 200))
def test_dead_pages_are_those_that_no_later_token_sees(rule, position):
    seen = set().union(*(pages_seen(rule, p) for p in range(position, position + 2 * rule.page_size + rule.window)))
    dead = set(range(rule.num_sink_pages, rule.num_sink_pages + rule.num_dead(position)))
    assert not dead & seen
    before_window = set(range(max(0, position - rule.window + 1) // rule.page_size))
    assert before_window - seen == dead


@given(rule=RULES, computed=st.integers(1, 200), data=st.data())
def test_most_is_what_the_longest_step_needs_and_no_more(rule, computed, data):
    step = data.draw(st.integers(1, rule.step_tokens))
    needed = -(-(computed + step) // rule.page_size) - rule.num_dead(computed - 1)
    assert needed <= rule.most(computed + step)
    longest = max(-(-(c + rule.step_tokens) // rule.page_size) - rule.num_dead(c - 1) for c in range(1, 120))
    assert longest == rule.most(10_000)


@pytest.mark.parametrize(
    ("windows", "options", "wanted"),
    [
        ((4096, 4096), {}, (4096, 0)),
        ((4096, 1024), {}, (4096, 0)),
        ((4096, None), {}, (None, 0)),  # one page table for all layers: nothing is given back
        ((None, None), {"attention_window": 1020, "attention_sinks": 4}, (1020, 4)),
        ((512, None), {"attention_window": 1020, "attention_sinks": 4}, (1020, 4)),
        ((512, 256), {"attention_window": 1020, "attention_sinks": 4}, (512, 4)),
    ],
)
def test_the_rule_of_a_model(windows, options, wanted):
    live = LivePages.of(dataclasses.replace(MODEL, layer_windows=windows), EngineConfig(**options))
    assert (live.window, live.sinks, live.step_tokens) == (*wanted, 512)


def test_long_requests_of_a_windowed_model_need_few_pages():
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=512, page_size=16)
    each = 1 + (4096 + 512 + 14) // 16
    assert plan_pages(MODEL, config, F32, 1 << 40, False) == (1 + 2 * each, 1 << 15)
    small = dataclasses.replace(config, num_pages=1 + each, max_model_len=1 << 15)
    assert plan_pages(MODEL, small, F32, 0, False) == (1 + each, 1 << 15)
    with pytest.raises(ValueError, match=rf"max_model_len is 32768, which needs {1 + each} pages"):
        plan_pages(MODEL, dataclasses.replace(small, num_pages=each), F32, 0, False)
    fewer = dataclasses.replace(config, num_pages=each)
    assert plan_pages(MODEL, fewer, F32, 0, False) == (each, 16 * (each - 1))


def test_streams_may_be_longer_than_the_models_limit_and_are_not_by_default():
    config = EngineConfig(max_num_seqs=1, attention_window=1020, attention_sinks=4, max_model_len=1 << 20)
    live = LivePages.of(MODEL, config)
    assert plan_pages(MODEL, config, F32, 1 << 40, False) == (1 + live.most(1 << 20), 1 << 20)
    assert live.most(1 << 20) == 1 + 1 + (1020 + 512 + 14) // 16
    assert plan_pages(MODEL, dataclasses.replace(config, max_model_len=None), F32, 1 << 40, False)[1] == 1 << 15
    with pytest.raises(ValueError, match="max_model_len=16777217 is more than the model's 16777216 tokens"):
        plan_pages(MODEL, dataclasses.replace(config, max_model_len=(1 << 24) + 1), F32, 1 << 40, False)


def test_bounds_of_streaming_are_checked():
    with pytest.raises(ValueError, match=r"4 sinks and a window of 32765 are more than the 32768 tokens"):
        MODEL.streaming(4, 32765)
    narrow = EngineConfig(kv_dtype="int4", page_size=64, attention_window=1024, attention_sinks=4)
    with pytest.raises(ValueError, match=r"a window of 32 must be at least page_size=64"):
        narrow.seen_by(dataclasses.replace(MODEL, layer_windows=(32, 4096)))
    assert dataclasses.replace(narrow, attention_sinks=0).seen_by(MODEL).layer_windows == (1024, 1024)
