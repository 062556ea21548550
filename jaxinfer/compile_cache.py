"""Compiled programs on disk, so that a later process neither traces nor compiles them.

jax has a cache of its own, which it asks after tracing and lowering: for a model of 30 layers that alone takes seconds.
Here a program is found by what goes into it.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import platformdirs

from pallas_kernels.cpu import Library, cpu_library
from pallas_kernels.cpu.isa import cpu_flags

log = logging.getLogger(__name__)

PACKAGES = ("jaxinfer", "pallas_kernels")  # whose sources a program is made of
MAX_PROGRAMS = 128  # files kept; those that have not been used for longest go first
MAGIC = b"jaxinfer program\n"
_DIGEST_BYTES = 32


class ProgramCache:
    """A folder of compiled programs, a file each.

    Reading one runs what is in it: the folder must be as trustworthy as the installation itself.
    """

    def __init__(self, folder: Path | None = None):
        """`folder` is by default in the user's cache directory; it need not exist, nor be writable."""
        self._folder = folder or Path(platformdirs.user_cache_dir("jaxinfer")) / "programs"

    def get(self, parts: tuple[Any, ...], arguments: Any, device: Any, compile_: Callable[[], Any]) -> tuple[Any, bool]:
        """Returns a compiled program, and whether it was found.

        Args:
            parts: what `compile_` depends on beside the arguments, the environment and the sources: values whose
                `repr` says all there is to say.
            arguments: a tree of arrays, or of shapes, with which the program is called.
            device: where the program runs.
            compile_: compiles it (`jax.stages.Compiled`).
        """
        path = self._folder / _key(parts, arguments, device)
        program = _read(path, device)
        if program is not None:
            return program, True
        program = compile_()
        self._write(path, program, _library(device))
        return program, False

    def _write(self, path: Path, program: Any, library: Library | None) -> None:
        """Writes a file; what cannot be kept costs the next process some time, nothing else."""
        from jax.experimental import serialize_executable

        try:
            targets = () if library is None else library.registered
            payload = pickle.dumps((targets, serialize_executable.serialize(program)))
            _write_whole(path, MAGIC + hashlib.sha256(payload).digest() + payload)
            self._drop_oldest()
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            log.warning("a compiled program could not be kept: %s", error)

    def _drop_oldest(self) -> None:
        ages = {}
        for file in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process has dropped it, or moved it into its place
                ages[file] = file.stat().st_mtime
        for file in sorted(ages, key=ages.__getitem__, reverse=True)[MAX_PROGRAMS:]:
            file.unlink(missing_ok=True)


def default_program_cache() -> ProgramCache | None:
    """Returns the cache in the user's folder, or None where jax has a place for its own cache, which then serves."""
    return ProgramCache() if jax.config.jax_compilation_cache_dir is None else None


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete_on_close=False) as part:
        part.write(content)
        part.close()
        os.replace(part.name, path)  # whatever fails, the part goes at the end of the block


def _read(path: Path, device: Any) -> Any:
    """Returns the program of a file, None when there is none that can be used."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("a compiled program cannot be read (%s): it is compiled again", error)
        return None
    start = len(MAGIC) + _DIGEST_BYTES
    payload = memoryview(content)[start:]
    if content[:start] != MAGIC + hashlib.sha256(payload).digest():
        log.warning("%s is damaged: compiled again", path)
        return None
    from jax.experimental import serialize_executable

    try:
        targets, serialized = pickle.loads(payload)
        for target in targets:
            cpu_library().target(target)
        program = serialize_executable.deserialize_and_load(*serialized, execution_devices=[device])
    except Exception as error:  # whatever a file of another making raises
        log.warning("%s cannot be loaded (%s): compiled again", path, error)
        return None
    with contextlib.suppress(OSError):  # a read-only folder
        os.utime(path)  # used: among the last to be dropped
    return program


def _key(parts: tuple[Any, ...], arguments: Any, device: Any) -> str:
    leaves, tree = jax.tree.flatten(arguments)
    shapes = [(leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)) for leaf in leaves]
    library = _library(device)
    made_of = (
        parts, str(tree), shapes, _sources(), jax.__version__, metadata.version("jaxlib"), metadata.version("flax"),
        (device.platform, device.device_kind, device.id, device.client.platform_version),
        (platform.machine(), sorted(cpu_flags())) if device.platform == "cpu" else None,
        None if library is None else library.path.name,  # which names source and compiler
        {name: getattr(jax.config, name, None) for name in sorted(jax.config.values)},
        {name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
    )  # fmt: skip
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]


@functools.cache
def _sources() -> str:
    """Returns a hash of the sources that programs are traced from."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        root = Path(__file__).parents[1] / package
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _library(device: Any) -> Library | None:
    """Returns the library whose kernels a program for this device may call."""
    if device.platform != "cpu":
        return None
    try:
        return cpu_library()
    except NotImplementedError:
        return None
