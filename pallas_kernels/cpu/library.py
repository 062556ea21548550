"""The loaded C++ library and its FFI targets."""

import ctypes
import functools
import logging
import threading
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.cpu.build import CannotBuild, built_library
from pallas_kernels.cpu.isa import ISA, available_isas
from pallas_kernels.target import current_target, require_one_device

log = logging.getLogger(__name__)

_lock = threading.Lock()


class Library:
    """A loaded library; `target(name)` is what `jax.ffi.ffi_call` is given."""

    def __init__(self, isa: ISA, path: Path) -> None:
        self.isa = isa
        self.path = path
        self._handlers = ctypes.CDLL(str(path))
        self._registered: set[str] = set()  # names of handlers

    def target(self, name: str) -> str:
        """Returns the FFI target of the C++ handler `name`, registered on first use."""
        target = f"jaxinfer_{name}_{self.isa.name}"
        with _lock:
            if name not in self._registered:
                capsule = jax.ffi.pycapsule(getattr(self._handlers, name))
                jax.ffi.register_ffi_target(target, capsule, platform="cpu")
                self._registered.add(name)
        return target

    @property
    def registered(self) -> tuple[str, ...]:
        """The handlers that have a target by now: all that a program compiled in this process may call."""
        with _lock:
            return tuple(sorted(self._registered))

    def function(self, name: str) -> Any:
        """Returns a plain C function of the library, called without Python's lock."""
        return getattr(self._handlers, name)


@functools.cache
def load_library(isa: ISA) -> Library | CannotBuild:
    """Returns the library for `isa`, compiled if need be, or why there is none; asked once a process."""
    try:
        return Library(isa, built_library(isa))
    except (CannotBuild, OSError) as error:
        reason = error if isinstance(error, CannotBuild) else CannotBuild(f"the library does not load: {error}")
        log.warning("CPU kernels are not used and XLA's slower code runs instead: %s", reason)
        return reason


def cpu_library() -> Library:
    """Returns the library for the best instruction set of this machine.

    Raises:
        NotImplementedError: it cannot be built here, with the reason.
    """
    library = load_library(available_isas()[0])
    if isinstance(library, CannotBuild):
        raise NotImplementedError(f"cpu needs its C++ library: {library}")
    return library


def require_cpu() -> Library:
    """Declines every device but a CPU.

    Raises:
        NotImplementedError: "not this implementation", with the reason.
    """
    target = current_target()
    if target.platform != "cpu":
        raise NotImplementedError(f"cpu is for CPUs, this is {target}")
    require_one_device("cpu")
    return cpu_library()
