import functools

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.kv_write.mosaic_tpu import write_kv_mosaic_tpu
from tests.pallas_kernels.kv_write.cases import CASES, DEFAULT, EMPTY, FLOAT16, SLOW, Case, check, make
from tests.pallas_kernels.targets import lower


def _run(arguments, interpret):
    *positional, rope = arguments
    return jax.jit(functools.partial(write_kv_mosaic_tpu, rope=rope, interpret=interpret))(*positional)


@pytest.mark.parametrize(
    "case", [*DEFAULT[:2], *(pytest.param(c, marks=pytest.mark.slow) for c in (EMPTY, DEFAULT[2], *SLOW))], ids=str
)
def test_equals_the_reference(case):
    arguments = make(case)
    check(case, arguments, _run(arguments, True))


def test_has_no_races():
    case = Case("bf16", "bf16", T=4, K=1, H=32)
    arguments = make(case)
    check(case, arguments, _run(arguments, pltpu.InterpretParams(detect_races=True)))
    from jax._src.pallas.mosaic.interpret.interpret_pallas_call import races

    assert not races.races_found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lowers_for_v5e(case):
    *positional, rope = make(case)
    text = lower(lambda *a: write_kv(*a, rope=rope, implementation="mosaic_tpu"), *positional, target="v5e")
    assert "tpu_custom_call" in text


@pytest.mark.parametrize(
    ("case", "message"), [(FLOAT16, "float16 pages"), (Case("bf16", "bf16", page_size=4096), "bytes of VMEM")]
)
def test_refuses(case, message):
    *positional, _ = make(case)
    with pytest.raises(NotImplementedError, match=message):
        lower(lambda *a: write_kv(*a, implementation="mosaic_tpu"), *positional, target="v5e")
