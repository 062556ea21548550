"""Compiles the C++ kernels into one shared library a machine, source and compiler."""

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from pallas_kernels.cpu.isa import ISA

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[1]
OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi")


class CannotBuild(Exception):
    """Why there is no library: no compiler, or its error."""


def built_library(isa: ISA, cache: Path | None = None) -> Path:
    """Returns the path of the library for `isa`, compiled now unless an earlier process has done so.

    The compiler is that of the environment variable CXX, else c++. The cache folder (by default the user's) may be
    read-only or full: the library is then built in a temporary folder each time.

    Raises:
        CannotBuild: with the reason, and how to mend it.
    """
    compiler = _compiler()
    sources = sorted(ROOT.glob("*/cpu*.cc"))
    name = f"kernels-{isa.name}-{_fingerprint(compiler, sources, isa)}.so"
    folder = cache or _cache_folder()
    if (folder / name).is_file():
        return folder / name
    with _lock(folder), tempfile.TemporaryDirectory(prefix="jaxinfer-") as scratch:
        if (folder / name).is_file():  # another process has made it meanwhile
            return folder / name
        started = time.perf_counter()
        log.warning("compiling the CPU kernels for %s with %s (once a version)", isa.name, compiler[0])
        path = _keep(_compile(compiler, sources, isa, Path(scratch)), folder / name)
        log.info("compiled the CPU kernels in %.1f s", time.perf_counter() - started)
        return path


def _cache_folder() -> Path:
    import platformdirs  # not needed where kernels are compiled for another machine

    return Path(platformdirs.user_cache_dir("jaxinfer")) / "kernels"


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Lets one process at a time compile, where the system can."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            folder.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(folder / "lock", "w")), fcntl.LOCK_EX)
        yield


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(command[0]) is None:
        raise CannotBuild(f"no C++ compiler ({command[0]} is not installed); install g++ or clang, or set CXX")
    return command


def _fingerprint(compiler: Sequence[str], sources: Sequence[Path], isa: ISA) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256("\0".join((*compiler, version, *OPTIONS, *isa.options, jax.__version__)).encode())
    for source in (*sources, *sorted(ROOT.glob("*/*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: Sequence[str], sources: Sequence[Path], isa: ISA, scratch: Path) -> Path:
    options = (*OPTIONS, *isa.options, f"-I{ROOT}", f"-isystem{jax.ffi.include_dir()}")

    def compile_one(source: Path) -> Path:
        result = scratch / f"{source.parent.name}-{source.stem}.o"
        _run([*compiler, *options, "-c", str(source), "-o", str(result)])
        return result

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    library = scratch / "kernels.so"
    _run([*compiler, "-shared", *map(str, objects), "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"the C++ compiler {command[0]} failed: {error}") from error
    if done.returncode:
        message = done.stderr.strip()[-2000:] or f"exit status {done.returncode} and no message"
        log.debug("failed: %s", shlex.join(command))
        raise CannotBuild(f"the C++ compiler {command[0]} failed: {message}")


def _keep(made: Path, wanted: Path) -> Path:
    """Moves the library into the cache, whole or not at all; where that fails, into a folder of this process."""
    try:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=wanted.parent, delete=False) as part:
            part.write(made.read_bytes())
        os.replace(part.name, wanted)
        return wanted
    except OSError as error:
        log.warning("the compiled CPU kernels could not be kept (%s): the next process compiles them again", error)
        own = Path(tempfile.mkdtemp(prefix="jaxinfer-kernels-")) / wanted.name
        shutil.copy(made, own)
        return own
