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


@given(st.lists(st.integers(0, 5), max_size=30), st.randoms(use_true_random=False))
def test_a_page_has_one_owner(counts, random):
    pool, owners = PagePool(num_pages=12, page_size=2), []
    for count in counts:
        if owners and random.random() < 0.4:
            pool.free(owners.pop(random.randrange(len(owners))))
        free = pool.num_free
        pages = pool.allocate(count)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert len(pages) == count
            owners.append(pages)
        held = [page for pages in owners for page in pages]
        pool.check_integrity(held)
        assert pool.num_used == len(held)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pool, held: held.pop(), r"lost \[\d\]"),
        (lambda pool, held: held.append(held[0]), r"twice \[\d\]"),
        (lambda pool, held: pool.free(held[:1]), r"twice \[\d\]"),
        (lambda pool, held: held.append(NULL_PAGE), r"unknown \[0\]"),
        (lambda pool, held: held.append(99), r"unknown \[99\]"),
    ],
    ids=["lost", "held twice", "held and free", "null page", "not of this pool"],
)
def test_integrity_names_what_is_wrong(change, message):
    pool = PagePool(num_pages=6, page_size=2)
    held = pool.allocate(3)
    pool.check_integrity(held)
    change(pool, held)
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity(held)
