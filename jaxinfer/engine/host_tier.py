"""KV pages that the device has had to give up: in host memory, and behind it on disk. Imports no jax.

Pages go down when their memory is needed and come up when a request wants them. All tiers know a page by its key, which
says what is in it (see `prefix_cache.py`), so that a page may be in several at once, nothing has to be kept equal, and
what is lost is computed again. Nothing here waits, but for `wait` and `flush`: copies run on the device's own engines,
and files are read and written in threads.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol

MAX_STAGED = 32  # pages on their way to the device, or there and not yet in the pool
MAX_READS = 64  # pages that are being read from disk
MAX_WRITES = 64  # pages that wait to be written to disk; more are dropped

HostPage = Any  # what the transfer makes of a page: here only kept
StagedPage = Any  # a page on the device, outside the pool


class Transfer(Protocol):
    """Moves pages between host and device, and to bytes."""

    page_bytes: int

    def upload(self, page: HostPage) -> StagedPage:
        """Starts to copy a page to the device."""
        ...

    def is_ready(self, page: StagedPage) -> bool:
        """Returns whether the copy is done."""
        ...

    def wait(self, page: StagedPage) -> None:
        """Blocks until it is."""
        ...

    def pack(self, page: HostPage) -> bytes:
        """Returns the content of a page."""
        ...

    def unpack(self, data: bytes) -> HostPage:
        """Returns the page of this content."""
        ...


class Disk(Protocol):
    """Pages as files; called from threads."""

    num_pages: int
    num_evictions: int
    num_skipped: int

    def __contains__(self, key: bytes) -> bool:
        """Returns whether a page may be there: its file may still turn out to be damaged."""
        ...

    def read(self, key: bytes) -> bytes | None:
        """Returns the content of a page; None where none is whole, and the key is unknown from then on."""
        ...

    def write(self, key: bytes, data: bytes) -> None:
        """Keeps a page, or does not; never an error."""
        ...

    def clear(self) -> None:
        """Drops all pages."""
        ...


@dataclasses.dataclass(frozen=True)
class TierStats:
    """What the tiers hold and have moved, in pages of `page_bytes`.

    Attributes:
        page_bytes: bytes of one page, all layers.
        num_host_pages: pages in host memory.
        num_disk_pages: pages on disk.
        num_pages_out: copied from the device to the host.
        num_pages_in: copied from the host to the device and used.
        num_host_hits: those of them that were in host memory.
        num_disk_hits: those that were on disk.
        num_host_evictions: pages whose host memory was needed.
        num_disk_evictions: files whose space was needed.
        num_dropped: pages not written because the disk was too slow.
        num_skipped_files: files that were damaged, or of another model or version.
    """

    page_bytes: int = 0
    num_host_pages: int = 0
    num_disk_pages: int = 0
    num_pages_out: int = 0
    num_pages_in: int = 0
    num_host_hits: int = 0
    num_disk_hits: int = 0
    num_host_evictions: int = 0
    num_disk_evictions: int = 0
    num_dropped: int = 0
    num_skipped_files: int = 0


class HostTier:
    """A bounded store of pages by key, least recently used out first."""

    def __init__(
        self, capacity: int, transfer: Transfer, disk: Disk | None = None, *,
        make_executor: Callable[[], Executor] = lambda: ThreadPoolExecutor(1, "jaxinfer-pages"),
    ):  # fmt: skip
        """Makes an empty tier of `capacity` pages over what `disk` already has."""
        self.capacity = capacity
        self._transfer = transfer
        self._disk = disk
        self._reader, self._writer = (make_executor(), make_executor()) if disk is not None else (None, None)
        self._pages: collections.OrderedDict[bytes, HostPage] = collections.OrderedDict()
        self._staged: dict[bytes, tuple[StagedPage, bool]] = {}  # and whether it was read from disk
        self._wanted: list[bytes] = []
        self._reads: dict[bytes, Future[HostPage | None]] = {}
        self._writes: dict[bytes, tuple[HostPage, Future[None]]] = {}
        self._from_disk: set[bytes] = set()  # of the pages here, those read from disk and not yet asked for
        self._num_out = self._num_evictions = self._num_dropped = 0
        self._num_hits = [0, 0]  # in host memory, on disk

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self._transfer.page_bytes

    def __contains__(self, key: bytes) -> bool:
        """Returns whether a page may be had, unless its file turns out to be damaged."""
        if key in self._pages or key in self._staged or key in self._writes or key in self._reads:
            return True
        return self._disk is not None and key in self._disk

    def put(self, key: bytes, page: HostPage) -> None:
        """Takes a page from the device."""
        self._num_out += 1
        self._keep(key, page)

    def stage(self, keys: Sequence[bytes]) -> None:
        """Says which pages are wanted next, the first first: they start for the device, and no others."""
        self._wanted = list(dict.fromkeys(keys))[:MAX_STAGED]
        for key in set(self._staged).difference(self._wanted):
            del self._staged[key]
        self._poll()
        for key in self._wanted:
            if key in self._staged:
                continue
            if (page := self._find(key)) is not None:
                self._staged[key] = self._transfer.upload(page), key in self._from_disk
                self._from_disk.discard(key)
            else:
                self.read_ahead([key])

    def take(self, key: bytes) -> StagedPage | None:
        """Returns a page on the device that was staged and has arrived."""
        page, from_disk = self._staged.get(key, (None, False))
        if page is None or not self._transfer.is_ready(page):
            return None
        del self._staged[key]
        self._wanted.remove(key)
        self._num_hits[from_disk] += 1
        return page

    def read_ahead(self, keys: Iterable[bytes]) -> None:
        """Starts to read the pages that are only on disk."""
        self._poll()
        for key in keys:
            if len(self._reads) >= MAX_READS:
                return
            if self._disk is not None and self._find(key) is None and key not in self._reads and key in self._disk:
                assert self._reader is not None
                self._reads[key] = self._reader.submit(self._read, self._disk, key)

    def wait(self) -> None:
        """Blocks until the page that is wanted first has come nearer."""
        key = self._wanted[0] if self._wanted else b""
        if key in self._staged:
            self._transfer.wait(self._staged[key][0])
        elif self._reads:
            self._reads.get(key, next(iter(self._reads.values()))).exception()

    def flush(self) -> None:
        """Writes to disk all that is not yet there, as far as it has room, and waits for it."""
        for key, page in list(self._pages.items()):
            self._write(key, page)
            self.wait_for_writes()

    def wait_for_writes(self) -> None:
        """Blocks until what was to be written has been."""
        for _, future in self._writes.values():
            future.exception()
        self._poll()

    def clear(self) -> None:
        """Drops all pages, also those on disk."""
        self.wait_for_writes()
        for store in (self._pages, self._staged, self._reads, self._from_disk):
            store.clear()
        if self._disk is not None:
            self._disk.clear()

    def close(self) -> None:
        """Ends the threads."""
        for executor in filter(None, (self._reader, self._writer)):
            executor.shutdown()

    def stats(self) -> TierStats:
        """Returns what there is and what was moved."""
        disk, (host_hits, disk_hits) = self._disk, self._num_hits
        return TierStats(
            page_bytes=self._transfer.page_bytes,
            num_host_pages=len(self._pages),
            num_disk_pages=disk.num_pages if disk is not None else 0,
            num_pages_out=self._num_out,
            num_pages_in=host_hits + disk_hits,
            num_host_hits=host_hits,
            num_disk_hits=disk_hits,
            num_host_evictions=self._num_evictions,
            num_disk_evictions=disk.num_evictions if disk is not None else 0,
            num_dropped=self._num_dropped,
            num_skipped_files=disk.num_skipped if disk is not None else 0,
        )

    def check_integrity(self) -> None:
        """Checks the bounds.

        Raises:
            RuntimeError: there are more pages, or more on their way, than there may be.
        """
        sizes = {
            "in host memory": (len(self._pages), self.capacity),
            "staged": (len(self._staged), MAX_STAGED),
            "being read": (len(self._reads), MAX_READS),
            "being written": (len(self._writes), MAX_WRITES),
            "staged and not wanted": (len(self._staged.keys() - set(self._wanted)), 0),
        }
        if wrong := [f"{count} of {limit} pages {what}" for what, (count, limit) in sizes.items() if count > limit]:
            raise RuntimeError(f"the host tier is inconsistent: {', '.join(wrong)}")

    def _find(self, key: bytes) -> HostPage | None:
        if key in self._pages:
            self._pages.move_to_end(key)
            return self._pages[key]
        return self._writes[key][0] if key in self._writes else None

    def _keep(self, key: bytes, page: HostPage) -> None:
        self._pages[key] = page
        self._pages.move_to_end(key)
        while len(self._pages) > self.capacity:
            oldest, content = self._pages.popitem(last=False)
            self._num_evictions += 1
            self._from_disk.discard(oldest)
            self._write(oldest, content)

    def _write(self, key: bytes, page: HostPage) -> None:
        if self._disk is None or key in self._disk or key in self._writes:
            return
        self._poll_writes()
        if len(self._writes) >= MAX_WRITES:
            self._num_dropped += 1
            return
        assert self._writer is not None
        disk, pack = self._disk, self._transfer.pack
        self._writes[key] = (page, self._writer.submit(lambda: disk.write(key, pack(page))))

    def _read(self, disk: Disk, key: bytes) -> HostPage | None:
        data = disk.read(key)
        return None if data is None else self._transfer.unpack(data)

    def _poll(self) -> None:
        """Takes over what the threads have finished."""
        self._poll_writes()
        for key in [key for key, future in self._reads.items() if future.done()]:
            page = self._reads.pop(key).result()
            if page is not None and key not in self._pages:
                self._from_disk.add(key)
                self._keep(key, page)

    def _poll_writes(self) -> None:
        for key in [key for key, (_, future) in self._writes.items() if future.done()]:
            self._writes.pop(key)[1].result()
