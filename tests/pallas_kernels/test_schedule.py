"""The work list against brute force: which (token, key block) pairs it covers."""

import jax
import numpy as np
import pytest

from pallas_kernels.paged_attention import make_schedule
from pallas_kernels.paged_attention.schedule import (
    BLOCK_BASE,
    BLOCK_END,
    BLOCK_K,
    BLOCK_START,
    ROW,
    TOKEN_END,
    TOKEN_START,
)

T, S, PAGE_SIZE, M = 450, 20, 16, 40
ROWS = {  # (q_len, kv_len) of each row, and how many leading rows are decode rows
    "decode": ([(1, 1), (1, 256), (1, 257), (1, 300), (1, 600)], 5),
    "decode_more_than_a_group": ([(1, 3 + 30 * i) for i in range(19)], 19),
    "decode_as_tiles": ([(1, 5), (1, 633)], 0),
    "prefill": ([(300, 321), (130, 600)], 0),
    "mixed": ([(1, 31), (1, 2), (1, 513), (9, 30), (128, 128), (3, 520), (129, 640)], 3),
    "holes": ([(1, 8), (0, 0), (5, 9), (0, 0), (1, 1)], 2),
    "nothing": ([], 0),
}
make = jax.jit(make_schedule, static_argnums=(0, 1, 2, 6))


def lengths(rows):
    rows = rows + [(0, 0)] * (S - len(rows))
    cu_q_lens = np.cumsum([0] + [q_len for q_len, _ in rows]).astype(np.int32)
    return np.array([kv_len for _, kv_len in rows], np.int32), cu_q_lens


def covered(items, block_rows):
    """(token, row, key block) of all work of a list, in order; checks that blocks of items follow each other."""
    items, work, index = np.asarray(items), [], 0
    for item in items:
        if item[BLOCK_END] == item[BLOCK_START]:
            continue
        assert item[BLOCK_START] == index
        index = item[BLOCK_END]
        for count in range(item[BLOCK_START], item[BLOCK_END]):
            for i, token in enumerate(range(item[TOKEN_START], item[TOKEN_END])):
                work.append((token, item[ROW] + (i if block_rows else 0), count - item[BLOCK_BASE]))
    assert index == items[-1, BLOCK_END]
    return work


@pytest.mark.parametrize("window", [None, 1, 8, 300, 10_000])
@pytest.mark.parametrize("name", ROWS)
def test_covers_every_visible_pair_once(name, window):
    rows, num_decode_rows = ROWS[name]
    kv_lens, cu_q_lens = lengths(rows)
    schedule = make(T, PAGE_SIZE, M, kv_lens, cu_q_lens, np.int32(num_decode_rows), window)
    positions = np.asarray(schedule.positions)
    for items, row_range, is_decode in (
        (schedule.decode_items, range(num_decode_rows), True),
        (schedule.prefill_items, range(num_decode_rows, S), False),
    ):
        wanted = set()
        for row in row_range:
            for token in range(cu_q_lens[row], cu_q_lens[row + 1]):
                position = kv_lens[row] - cu_q_lens[row + 1] + token
                assert positions[token] == position
                first = 0 if window is None else max(0, position - window + 1)
                wanted |= {(token, row, block) for block in range(first // BLOCK_K, position // BLOCK_K + 1)}
        work = covered(items, is_decode)
        assert len(work) == len(set(work))
        assert wanted <= set(work)
        spare = {(block, row) for _, row, block in set(work) - wanted}
        for token, row, _ in work:
            assert row == token if is_decode else cu_q_lens[row] <= token < cu_q_lens[row + 1]
        if not is_decode:  # what is not needed by a token is needed by another of its tile
            assert all(any(row == r and block == b for _, r, b in wanted) for block, row in spare)
    assert (positions[cu_q_lens[-1] :] == -1).all()


def test_blocks_before_the_window_are_skipped():
    """With a window of 8, key 512, which starts the third block, is the first that the token at 519 sees."""
    for kv_len, full, windowed in ((600, 3, 1), (520, 3, 1), (519, 3, 2), (513, 3, 2), (512, 2, 1)):
        for rows, num_decode_rows, name in (
            ([(1, kv_len)] * 3, 3, "decode_items"),
            ([(1, kv_len)], 0, "prefill_items"),
        ):
            for window, blocks in ((None, full), (8, windowed)):
                schedule = make(T, PAGE_SIZE, M, *lengths(rows), np.int32(num_decode_rows), window)
                assert getattr(schedule, name)[-1, BLOCK_END] == blocks


def test_all_rows_are_decode_rows():
    kv_lens = np.array([0, 5, 300, 0] + [7] * 16, np.int32)
    schedule = make(S, PAGE_SIZE, M, kv_lens, np.arange(S + 1, dtype=np.int32), None, None)
    assert schedule.prefill_items is None
    np.testing.assert_array_equal(schedule.positions, kv_lens - 1)
    work = covered(schedule.decode_items, True)
    assert {(1, 1, 0), (2, 2, 0), (2, 2, 1)} <= set(work)
    assert len(work) == len(set(work)) == 8 * 2 + 8 + 4  # blocks of the longest row, for each group of eight


def test_a_short_table_makes_short_blocks():
    schedule = make(4, PAGE_SIZE, 2, np.array([30], np.int32), np.array([0, 4], np.int32), np.int32(0), None)
    assert (schedule.pages_per_block, schedule.block_q, schedule.block_rows) == (2, 4, 1)
