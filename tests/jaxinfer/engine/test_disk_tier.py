"""Files of pages: bounded, found again, and nothing in them believed."""

import os

import pytest

from jaxinfer.engine.disk_tier import HEADER_BYTES, DiskTier
from jaxinfer.engine.live_pages import LivePages
from jaxinfer.engine.page_pool import PagePool
from jaxinfer.engine.prefix_cache import PrefixCache
from tests.jaxinfer.engine.host import make_request

KEYS = [bytes([i]) * 32 for i in range(8)]
FINGERPRINT = b"f" * 32
FILE = HEADER_BYTES + 100


def page(i):
    return bytes([i]) * 100


def make(folder, pages=4, fingerprint=FINGERPRINT):
    return DiskTier(folder, pages * FILE, fingerprint)


def test_pages_are_found_by_a_later_process_and_by_no_other_model(tmp_path):
    tier = make(tmp_path / "new" / "folder")
    tier.write(KEYS[0], page(0))
    tier.write(KEYS[0], page(0))
    assert (tier.num_pages, tier.num_bytes) == (1, FILE)
    again = make(tmp_path / "new" / "folder")
    assert KEYS[0] in again
    assert again.read(KEYS[0]) == page(0)
    other = make(tmp_path / "new" / "folder", fingerprint=b"g" * 32)
    assert KEYS[0] not in other
    assert (other.num_pages, other.num_bytes, other.num_skipped) == (0, FILE, 1)
    other.clear()
    assert make(tmp_path / "new" / "folder").num_pages == 1


def test_the_least_recently_used_files_go_first_whoever_wrote_them(tmp_path):
    tier = make(tmp_path)
    for i in range(4):
        tier.write(KEYS[i], page(i))
        os.utime(tmp_path / tier._name(KEYS[i]), (1000 + i, 1000 + i))
    assert tier.read(KEYS[0]) == page(0)  # used now, which a later process sees
    other = make(tmp_path, fingerprint=b"g" * 32)
    other.write(KEYS[4], page(4))
    other.write(KEYS[5], page(5))
    assert other.num_evictions == 2
    again = make(tmp_path)
    assert [key in again for key in KEYS[:4]] == [True, False, False, True]
    assert again.num_bytes == 4 * FILE


def test_a_page_larger_than_the_folder_is_not_written(tmp_path):
    tier = make(tmp_path, pages=0.5)
    tier.write(KEYS[0], page(0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, 10, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1])
def test_a_truncated_file_is_no_page(tmp_path, length):
    tier = make(tmp_path)
    tier.write(KEYS[0], page(0))
    path = tmp_path / tier._name(KEYS[0])
    path.write_bytes(path.read_bytes()[:length])
    assert tier.read(KEYS[0]) is None
    assert (KEYS[0] in tier, tier.num_pages, tier.num_skipped, path.exists()) == (False, 0, 1, False)
    tier.write(KEYS[0], page(0))
    assert tier.read(KEYS[0]) == page(0)


@pytest.mark.parametrize("place", [0, 20, 60, 90, 99, 110, FILE - 1])
def test_a_changed_byte_is_seen_wherever_it_is(tmp_path, place):
    tier = make(tmp_path)
    tier.write(KEYS[0], page(0))
    path = tmp_path / tier._name(KEYS[0])
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    assert tier.read(KEYS[0]) is None


def test_a_file_that_has_gone_or_has_another_name_is_no_page(tmp_path):
    tier = make(tmp_path)
    tier.write(KEYS[0], page(0))
    tier.write(KEYS[1], page(1))
    os.replace(tmp_path / tier._name(KEYS[1]), tmp_path / tier._name(KEYS[0]))
    assert tier.read(KEYS[1]) is None
    assert tier.read(KEYS[0]) is None
    assert tier.read(KEYS[2]) is None


def test_what_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    tier = DiskTier(tmp_path / "file" / "folder", 10 * FILE, FINGERPRINT)
    tier.write(KEYS[0], page(0))
    tier.write(KEYS[1], page(1))
    assert len(caplog.records) == 1
    assert "KV pages are no longer written to" in caplog.text
    assert tier.read(KEYS[0]) is None


def test_pages_of_two_models_have_no_key_in_common():
    keys = []
    for namespace in (b"a" * 32, b"b" * 32, b""):
        request = make_request("r", num_prompt=9)
        PrefixCache(PagePool(20, 2), LivePages(2), namespace=namespace).match(request)
        keys += request.page_keys
    assert len(set(keys)) == len(keys) == 3 * 4
