import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.page_pool import NULL_PAGE, PagePool


def test_hands_out_every_page_but_the_null_page_once():
    pool = PagePool(num_pages=8, page_size=4)
    pages = pool.allocate(3) + pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7]
    assert NULL_PAGE not in pages
    assert (pool.num_free, pool.num_used) == (0, 7)


def test_refuses_more_than_is_free_and_keeps_what_it_has():
    pool = PagePool(num_pages=4, page_size=1)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert len(pool.allocate(3)) == 3
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_reuses_the_page_freed_last():
    pool = PagePool(num_pages=10, page_size=1)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(first)
    pool.free(second)
    assert sorted(pool.allocate(2)) == sorted(second)


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_for_rounds_up(num_tokens, pages):
    assert PagePool(num_pages=2, page_size=4).pages_for(num_tokens) == pages


def test_needs_a_page_besides_the_null_page():
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(num_pages=1, page_size=4)


def cached(pool, *keys):
    """Pages with these keys that nobody owns; the first is evicted last."""
    pages = pool.allocate(len(keys))
    for page, key in zip(pages, keys):
        pool.publish(page, key)
    pool.free(pages)
    return pages


def test_a_freed_page_with_a_key_is_found_again():
    pool = PagePool(num_pages=6, page_size=1)
    a, b = cached(pool, b"a", b"b")
    assert (pool.num_cached, pool.num_free, pool.num_used) == (2, 5, 0)
    assert (pool.find(b"a"), pool.find(b"b"), pool.find(b"c")) == (a, b, None)
    assert pool.allocate(1, [a]) == [a, 3]  # an empty page, not b's
    assert (pool.num_cached, pool.num_used) == (1, 2)


def test_empty_pages_go_first_then_the_tail_of_what_was_used_least_recently():
    pool = PagePool(num_pages=7, page_size=1)
    old, recent = cached(pool, b"old head", b"old tail"), cached(pool, b"head", b"tail")
    assert sorted(pool.allocate(2)) == [5, 6]
    assert pool.num_evictions == 0
    pool.free(pool.allocate(0, old[:1]))  # used again: the most recent now
    assert pool.allocate(4) == [old[1], recent[1], recent[0], old[0]]
    assert pool.num_evictions == 4
    assert pool.find(b"old head") is None
    pool.check_integrity(range(1, 7))


def test_pages_shared_are_not_counted_as_room_for_others():
    pool = PagePool(num_pages=4, page_size=1)
    pages = cached(pool, b"a", b"b", b"c")
    assert pool.allocate(2, pages[:2]) is None
    pool.check_integrity([])
    assert pool.allocate(1, pages[:2]) == pages
    assert pool.num_evictions == 1


def test_a_page_of_two_owners_is_free_after_both():
    pool = PagePool(num_pages=4, page_size=1)
    pages = pool.allocate(2)
    assert pool.allocate(0, pages[:1]) == pages[:1]
    assert pool.num_shared == 1
    pool.free(pages)
    assert (pool.num_used, pool.num_shared) == (1, 0)
    pool.free(pages[:1])
    assert pool.num_used == 0


def test_one_page_for_a_key():
    pool = PagePool(num_pages=4, page_size=1)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") == first
    pool.free([first, second])
    assert (pool.num_cached, pool.num_free) == (1, 3)


def test_forgets_everything():
    pool = PagePool(num_pages=5, page_size=1)
    cached(pool, b"a", b"b")
    [used] = pool.allocate(1)
    pool.publish(used, b"c")
    pool.forget()
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [None] * 3
    assert (pool.num_cached, pool.num_free) == (0, 3)
    pool.check_integrity([used])


@given(st.lists(st.integers(0, 5), max_size=30), st.randoms(use_true_random=False))
def test_pages_have_the_owners_that_were_given_them(counts, random):
    pool, owners = PagePool(num_pages=12, page_size=2), []
    for number, count in enumerate(counts):
        if owners and random.random() < 0.4:
            pool.free(owners.pop(random.randrange(len(owners))))
        shared = owners[-1][:2] if owners and random.random() < 0.4 else []
        free = pool.num_free
        pages = pool.allocate(count, shared)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert len(pages) == count + len(shared)
            owners.append(pages)
            if pages and random.random() < 0.5:
                pool.publish(pages[-1], number.to_bytes())
        held = [page for pages in owners for page in pages]
        pool.check_integrity(held)
        assert pool.num_used == len(set(held))


def _swap_keys(pool):
    (a, first), (b, second) = list(pool._keys.items())[:2]
    pool._keys |= {a: second, b: first}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pool, held: held.remove(6), r"lost \[6\], with wrong owners \[6\]"),
        (lambda pool, held: held.append(held[0]), r"wrong owners \[\d\]"),
        (lambda pool, held: pool.free(held[1:2]), r"free and held \[\d\]"),
        (lambda pool, held: pool._empty.append(pool._empty[0]), r"free twice \[\d\]"),
        (lambda pool, held: pool._empty.append(next(iter(pool._cached))), r"free twice \[\d\], empty with a key"),
        (lambda pool, held: pool._cached.popitem(), r"lost \[\d\]"),
        (lambda pool, held: pool._keys.popitem(), r"cached without a key \[\d\], of unknown keys"),
        (lambda pool, held: pool._pages.popitem(), r"with a wrong key \[\d\]"),
        (lambda pool, held: _swap_keys(pool), r"with a wrong key \[\d, \d\]"),
        (lambda pool, held: held.append(NULL_PAGE), r"unknown \[0\]"),
        (lambda pool, held: held.append(99), r"unknown \[99\]"),
    ],
    ids=[
        "lost", "one owner too many", "held and free", "free twice", "cached and empty", "cached and lost",
        "key lost", "page of a key lost", "keys swapped", "null page", "not of this pool",
    ],
)  # fmt: skip
def test_integrity_names_what_is_wrong(change, message):
    pool = PagePool(num_pages=9, page_size=2)
    cached(pool, b"a", b"b")
    held = pool.allocate(4, pool.allocate(1))
    held += held[:1]
    pool.check_integrity(held)
    change(pool, held)
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity(held)
