"""The instruction sets as parameters of tests: what this CPU lacks is skipped, the slow one is for the slow tests."""

import pytest

from pallas_kernels.cpu import Library
from pallas_kernels.cpu.build import CannotBuild
from pallas_kernels.cpu.isa import ISAS, available_isas
from pallas_kernels.cpu.library import load_library

NAMES = [pytest.param(isa.name, marks=pytest.mark.slow) if isa.name == "generic" else isa.name for isa in ISAS]


def library_for(name: str) -> Library:
    """Returns the kernels compiled for an instruction set."""
    isa = next((isa for isa in available_isas() if isa.name == name), None)
    if isa is None:
        pytest.skip(f"this CPU has no {name}")
    library = load_library(isa)
    if isinstance(library, CannotBuild):
        pytest.skip(str(library))
    return library
