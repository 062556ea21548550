"""KV pages as files of a bounded folder, found again by later processes. Imports no jax.

A file is written whole or not at all, and nothing in it is believed: magic, fingerprint, key, length and checksum have
to fit, or the page counts as not there. A page is data alone; reading one runs nothing.
"""

import collections
import contextlib
import hashlib
import logging
import os
import struct
import tempfile
import threading
from pathlib import Path

log = logging.getLogger(__name__)

MAGIC = b"jaxinfer kv page 1\n"
SUFFIX = ".kvpage"
_HEADER = struct.Struct(f"<{len(MAGIC)}s32s32sQ32s")  # magic, fingerprint, key, length and blake2b of the content

HEADER_BYTES = _HEADER.size


class DiskTier:
    """Pages of one model in a folder that it may share with others; the least recently used file goes first."""

    def __init__(self, folder: str | Path, max_bytes: int, fingerprint: bytes):
        """Looks at the names in the folder, and opens no file.

        Args:
            folder: need not exist, nor be writable.
            max_bytes: of all pages in it, those of other models included.
            fingerprint: 32 bytes that say of which model, in which precision and form, the pages are.
        """
        self.num_pages = 0  # of this model
        self.num_bytes = 0  # of all files
        self.num_evictions = 0
        self.num_skipped = 0
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        self._fingerprint = fingerprint
        self._prefix = fingerprint[:8].hex() + "-"
        self._is_writable = True
        self._lock = threading.Lock()
        self._sizes: collections.OrderedDict[str, int] = collections.OrderedDict()  # by name, oldest first
        found = []
        with contextlib.suppress(OSError):
            for path in self._folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(OSError):  # another process has dropped it
                    status = path.stat()
                    found.append((status.st_mtime_ns, path.name, status.st_size))
        for _, name, size in sorted(found):
            self._add(name, size)
            self.num_skipped += not name.startswith(self._prefix)

    def __contains__(self, key: bytes) -> bool:
        """Returns whether there is a file of this name."""
        return self._name(key) in self._sizes

    def read(self, key: bytes) -> bytes | None:
        """Returns the content of a page; None, and the file goes, if it is not whole."""
        name = self._name(key)
        path = self._folder / name
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        data = content[_HEADER.size :]
        if content[: _HEADER.size] != self._header(key, data):
            self.num_skipped += 1
            self._drop(name)
            return None
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)
        with contextlib.suppress(OSError):
            os.utime(path)  # the next process is to know that it was used
        return data

    def write(self, key: bytes, data: bytes) -> None:
        """Keeps a page, dropping the oldest to make room; after an error of the system no more are written."""
        content = self._header(key, data) + data
        if not self._is_writable or len(content) > self._max_bytes:
            return
        name = self._name(key)
        try:
            self._make_room(len(content))
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=self._folder, prefix=".part-", suffix=SUFFIX, delete_on_close=False
            ) as part:
                part.write(content)
                part.close()
                os.replace(part.name, self._folder / name)  # whatever fails, the part goes at the end of the block
        except OSError as error:
            self._is_writable = False
            log.warning("KV pages are no longer written to %s: %s", self._folder, error)
            return
        self._add(name, len(content))

    def clear(self) -> None:
        """Drops the pages of this model."""
        for name in [name for name in self._sizes if name.startswith(self._prefix)]:
            self._drop(name)

    def _make_room(self, size: int) -> None:
        while self._sizes and self.num_bytes + size > self._max_bytes:
            self._drop(next(iter(self._sizes)))
            self.num_evictions += 1

    def _add(self, name: str, size: int) -> None:
        self._remove(name)
        with self._lock:
            self._sizes[name] = size
            self.num_bytes += size
            self.num_pages += name.startswith(self._prefix)

    def _remove(self, name: str) -> None:
        with self._lock:
            size = self._sizes.pop(name, None)
            if size is not None:
                self.num_bytes -= size
                self.num_pages -= name.startswith(self._prefix)

    def _drop(self, name: str) -> None:
        self._remove(name)
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}{key.hex()}{SUFFIX}"

    def _header(self, key: bytes, data: bytes) -> bytes:
        checksum = hashlib.blake2b(data, digest_size=32).digest()
        return _HEADER.pack(MAGIC, self._fingerprint, key, len(data), checksum)
