import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config import EngineConfig
from jaxinfer.engine.batch import FLOAT_FIELDS, BatchShape, Buckets, StepBatch, build_batch
from jaxinfer.engine.request import Request
from jaxinfer.engine.scheduler import ScheduledRow, ScheduledStep
from jaxinfer.model.batch import decode_batch
from jaxinfer.sampling.params import SamplingParams
from tests.jaxinfer.engine.host import add, make_request, make_scheduler, run

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(
    temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, typical_p=0.8, repetition_penalty=1.3, presence_penalty=0.5,
    frequency_penalty=-0.5, min_tokens=3,
)  # fmt: skip


def row(name, prompt, output, in_flight, start, num_tokens, num_samples, *, pages, slot, params=GREEDY, seed=0):
    """A request with `in_flight` unread tokens, and its part of a step."""
    request = Request(name, list(range(100, 100 + prompt)), params, 50, seed)
    request.output_token_ids = list(range(200, 200 + output))
    request.num_in_flight = in_flight
    request.pages, request.slot = pages, slot
    return ScheduledRow(request, start, num_tokens, num_samples)


def unpack(step, shape, page_size):
    ints, floats = build_batch(step, shape, page_size)
    assert ints.dtype == np.int32
    assert floats.dtype == np.float32
    assert floats.shape == (len(FLOAT_FIELDS), shape.num_rows)
    return StepBatch.unpack(ints, floats, shape)


def test_every_array_of_a_mixed_step_by_hand():
    """Rows: one whose last token only the device knows, one decode whose token is known, a chunk, a last chunk."""
    step = ScheduledStep(
        [
            row("flying", 3, 1, 1, 4, 1, 1, pages=[9, 4], slot=2),
            row("known", 2, 1, 0, 2, 1, 1, pages=[7], slot=0, params=SAMPLED, seed=(5 << 32) + 6),
            row("chunk", 9, 0, 0, 3, 4, 0, pages=[5, 1, 8], slot=3),
            row("resumed", 2, 3, 0, 1, 4, 1, pages=[3, 6], slot=1),  # its prompt and its output, computed again
        ],
        2, [], [],
    )  # fmt: skip
    shape = BatchShape(num_tokens=16, num_rows=6, pages_per_row=4, is_decode=False)
    batch = unpack(step, shape, page_size=4)
    tokens, sampling = batch.tokens, batch.sampling
    wanted = {
        "token_ids": [-1, 200, 103, 104, 105, 106, 101, 200, 201, 202] + [0] * 6,
        "positions": [4, 2, 3, 4, 5, 6, 1, 2, 3, 4] + [0] * 6,
        "slot_mapping": [16, 30, 23, 4, 5, 6, 13, 14, 15, 24] + [0] * 6,
        "page_indices": [[9, 4, 0, 0], [7, 0, 0, 0], [5, 1, 8, 0], [3, 6, 0, 0], [0] * 4, [0] * 4],
        "kv_lens": [5, 3, 7, 5, 0, 0],
        "cu_q_lens": [0, 1, 2, 6, 10, 10, 10],
        "num_decode_rows": 2,
    }
    for name, value in wanted.items():
        np.testing.assert_array_equal(getattr(tokens, name), value, err_msg=name)
    np.testing.assert_array_equal(batch.logits_indices, [0, 1, 5, 9, 0, 0])
    np.testing.assert_array_equal(batch.num_samples, [1, 1, 0, 1, 0, 0])
    wanted = {
        "slots": [2, 0, 3, 1, 0, 0],
        "positions": [5, 3, 7, 5, 0, 0],
        "min_positions": [3, 5, 9, 2, 0, 0],
        "active": [True, True, False, True, False, False],
        "needs_state": [False, True, False, False, False, False],
        "seeds": [[0, 0], [5, 6], [0, 0], [0, 0], [0, 0], [0, 0]],
        "top_k": [0, 40, 0, 0, 0, 0],
        "temperature": [0, 0.7, 0, 0, 0, 0],
        "top_p": [1, 0.9, 1, 1, 1, 1],
        "min_p": [0, 0.1, 0, 0, 0, 0],
        "typical_p": [1, 0.8, 1, 1, 1, 1],
        "repetition_penalty": [1, 1.3, 1, 1, 1, 1],
        "presence_penalty": [0, 0.5, 0, 0, 0, 0],
        "frequency_penalty": [0, -0.5, 0, 0, 0, 0],
    }
    assert set(wanted) == {field.name for field in dataclasses.fields(sampling)}
    for name, value in wanted.items():
        found = np.asarray(getattr(sampling, name))
        np.testing.assert_array_equal(found, np.asarray(value, found.dtype), err_msg=name)


def test_a_decode_step_with_the_largest_seed():
    step = ScheduledStep([row("a", 3, 2, 3, 7, 1, 4, pages=[2, 3, 4, 5], slot=1, seed=2**63 - 1)], 1, [], [])
    batch = unpack(step, BatchShape(2, 2, 5, True), page_size=2)
    np.testing.assert_array_equal(batch.tokens.token_ids, [-1, 0])
    np.testing.assert_array_equal(batch.tokens.slot_mapping, [5 * 2 + 1, 0])
    np.testing.assert_array_equal(batch.num_samples, [4, 0])
    np.testing.assert_array_equal(batch.sampling.seeds[0], [2**31 - 1, 2**32 - 1])


def test_dead_pages_are_not_in_the_table_and_their_tokens_not_counted():
    rows = [
        row("decode", 3, 12, 0, 14, 1, 1, pages=[9, 4], slot=0),
        row("whole", 9, 0, 0, 3, 3, 0, pages=[5, 1], slot=1),
    ]
    rows[0].request.num_dead_pages = 2
    tokens = unpack(ScheduledStep(rows, 1, [], []), BatchShape(8, 2, 2, False), page_size=4).tokens
    np.testing.assert_array_equal(tokens.positions, [14, 3, 4, 5, 0, 0, 0, 0])
    np.testing.assert_array_equal(tokens.slot_mapping, [4 * 4 + 2, 5 * 4 + 3, 4, 5, 0, 0, 0, 0])
    np.testing.assert_array_equal(tokens.dead_lens, [8, 0])
    np.testing.assert_array_equal(tokens.kv_lens, [7, 6])
    again = decode_batch(
        tokens.token_ids[:2], np.int32([14, 5]), tokens.page_indices, np.array([True, False]), 4, None, tokens.dead_lens
    )
    np.testing.assert_array_equal(again.slot_mapping, [4 * 4 + 2, 0])
    np.testing.assert_array_equal(again.kv_lens, [7, 0])
    np.testing.assert_array_equal(again.places(), [6, 5])


def loop(step, page_size):
    """What each token and row of a step is, one at a time."""
    tokens, end = [], 0
    for row in step.rows:
        request = row.request
        known = [*request.prompt_token_ids, *request.output_token_ids]
        for position in range(row.start, row.start + row.num_tokens):
            slot = request.pages[position // page_size] * page_size + position % page_size
            tokens.append((known[position] if position < len(known) else -1, position, slot))
        end += row.num_tokens
        assert request.pages[(row.start + row.num_tokens + max(row.num_samples, 1) - 2) // page_size]
    return tokens


@given(st.data())
def test_a_loop_gives_the_same_and_the_buckets_hold_every_step(data):
    """Steps of a running scheduler, read late, against a plain loop; padding writes to page 0 and samples nothing."""
    page_size, seqs = data.draw(st.sampled_from([1, 2, 16])), data.draw(st.integers(1, 12))
    length = 40
    scheduler = make_scheduler(
        page_size=page_size, max_num_seqs=seqs, max_num_batched_tokens=seqs + data.draw(st.integers(0, 50)),
        num_pages=1 + data.draw(st.integers(1, 4)) * -(-length // page_size), decode_steps=data.draw(st.integers(1, 4)),
    )  # fmt: skip
    buckets = Buckets.of(scheduler.config, -(-length // page_size), data.draw(st.sampled_from([1, 2])))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, length - 1), st.integers(1, length)), min_size=1, max_size=14))
    for i, (prompt, output) in enumerate(sizes):
        params = SamplingParams(prompt_logprobs=1 if i % 3 == 0 else None)
        scheduler.add(make_request(i, prompt, min(output, length - prompt), params=params))
    pending = []
    for _ in range(12):
        step = scheduler.schedule()
        if step.rows:
            shape = buckets.shape_for(step)
            assert shape in buckets.all()
            assert shape.is_decode == step.is_decode
            assert not (shape.is_decode and any(row.wants_prompt_logprobs for row in step.rows))
            check_against_loop(step, shape, page_size)
            pending.append(step)
        if pending and (not step.rows or len(pending) > 1):
            done = pending.pop(0)
            scheduler.update(done, [[7] * row.num_samples for row in done.rows])


def check_against_loop(step, shape, page_size):
    ints, _ = build_batch(step, shape, page_size)
    parts, offset = {}, 0
    for name, part in shape.ints().items():
        size = int(np.prod(part, dtype=int))
        parts[name] = ints[offset : offset + size].reshape(part)
        offset += size
    assert offset == len(ints)
    tokens = loop(step, page_size)
    padded = tokens + [(0, 0, 0)] * (shape.num_tokens - len(tokens))
    columns = np.stack([parts["token_ids"], parts["positions"], parts["slot_mapping"]], axis=1)
    np.testing.assert_array_equal(columns, padded)
    lens = [row.num_tokens for row in step.rows] + [0] * (shape.num_rows - len(step.rows))
    np.testing.assert_array_equal(np.diff(parts["cu_q_lens"]), lens)
    unknown = np.flatnonzero(parts["token_ids"] < 0)
    assert (unknown < parts["num_decode_rows"]).all()  # the step finds their rows by that
    for s, row in enumerate(step.rows):
        np.testing.assert_array_equal(parts["page_indices"][s, : len(row.request.pages)], row.request.pages)
        assert not parts["page_indices"][s, len(row.request.pages) :].any()
        assert parts["kv_lens"][s] == parts["sampling.positions"][s] == row.start + row.num_tokens
        assert parts["logits_indices"][s] == parts["cu_q_lens"][s + 1] - 1
        assert parts["num_samples"][s] == row.num_samples
        assert parts["sampling.active"][s] == (row.num_samples > 0)
        assert parts["sampling.slots"][s] == row.request.slot
    for name in ("page_indices", "kv_lens", "num_samples", "sampling.active"):
        assert not parts[name][len(step.rows) :].any()


def test_buckets():
    config = EngineConfig(max_num_seqs=48, max_num_batched_tokens=1000, page_size=16)
    buckets = Buckets.of(config, 7)
    assert buckets.decode_rows == (1, 2, 4, 8, 16, 32, 48)
    assert buckets.ragged_tokens == (16, 32, 64, 128, 192, 256, 384, 512, 768, 1000)
    assert buckets.ragged_rows == (8, 48)
    assert buckets.pages_per_row == 7
    assert Buckets.of(config, 7, min_decode_rows=2).decode_rows[0] == 2
    assert Buckets.of(EngineConfig(max_num_seqs=1), 7, min_decode_rows=2).decode_rows == (2,)
    shapes = buckets.all()
    assert len(shapes) == len(set(shapes)) == 7 + 2 * 10


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "wanted"),
    [
        (1, 1, (16, 8)),
        (16, 8, (16, 8)),
        (17, 9, (32, 48)),
        (129, 8, (192, 8)),
        (193, 48, (256, 48)),
        (999, 1, (1000, 8)),
    ],
)
def test_the_smallest_ragged_shape(num_tokens, num_rows, wanted):
    buckets = Buckets.of(EngineConfig(max_num_seqs=48, max_num_batched_tokens=1000), 7)
    shape = buckets.ragged(num_tokens, num_rows)
    assert (shape.num_tokens, shape.num_rows, shape.is_decode) == (*wanted, False)


@pytest.mark.parametrize(("num_rows", "wanted"), [(1, 1), (3, 4), (32, 32), (33, 48), (48, 48)])
def test_the_smallest_decode_shape(num_rows, wanted):
    shape = Buckets.of(EngineConfig(max_num_seqs=48), 7).decode(num_rows)
    assert (shape.num_tokens, shape.num_rows, shape.is_decode) == (wanted, wanted, True)


def test_prompt_logprobs_go_to_a_ragged_shape():
    """Even where every row is one token from which a token is sampled."""
    scheduler = make_scheduler(max_num_seqs=1, max_num_batched_tokens=1)
    buckets = Buckets.of(scheduler.config, 10)
    add(scheduler, make_request("a", 2, 2, params=SamplingParams(prompt_logprobs=0)))
    assert [buckets.shape_for(run(scheduler)).is_decode for _ in range(3)] == [False, True, True]
