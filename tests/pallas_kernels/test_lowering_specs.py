"""Every case of every operation lowers for the device that its backend is for: the cheap half of a compile check."""

from pathlib import Path

import jax
import pytest

from pallas_kernels import registry
from tests.pallas_kernels.targets import lower, targeting

TARGETS = {"mosaic_gpu": "h200", "mosaic_tpu": "v5e"}
KERNELS = {"mosaic_gpu": "mosaic_gpu", "mosaic_tpu": "tpu_custom_call"}  # what the lowered program calls
CASES = [  # the first two of an operation by default, every third of the others in CI; kernel_table.py compiles all
    pytest.param(
        operation,
        spec,
        implementation,
        id=f"{operation}-{spec.name}-{implementation}",
        marks=pytest.mark.slow if i > 1 else (),
    )
    for operation in registry.operations()
    for i, spec in enumerate(registry.specs(operation))
    if i < 2 or i % 3 == 1
    for implementation in TARGETS
    if implementation in registry.implementations(operation)
]


@pytest.mark.parametrize(("operation", "spec", "implementation"), CASES)
def test_case_lowers(operation, spec, implementation):
    target = TARGETS[implementation]

    def call(*arguments):
        return spec.function(*arguments, implementation=implementation)

    try:
        text = lower(call, *jax.eval_shape(spec.arguments), target=target)
    except NotImplementedError:  # then something else must take the case
        with targeting(target):
            reasons = registry.explain_case(operation, spec)
        assert reasons[implementation]
        assert None in reasons.values()
        return
    assert KERNELS[implementation] in text


@pytest.mark.parametrize("operation", registry.operations())
def test_cases_have_names_work_and_a_taker_here(operation):
    specs = registry.specs(operation)
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names) > 0
    for spec in specs:
        assert spec.flops >= 0
        assert spec.num_bytes > 0
        assert spec.peak in ("bf16", "fp8", "int8")
    reasons = registry.explain_case(operation, specs[0])
    assert None in reasons.values()
    assert all(reasons[implementation] for implementation in TARGETS.keys() & reasons.keys())  # a CPU is neither


@pytest.mark.parametrize("operation", registry.operations())
def test_every_backend_takes_some_case_of_its_device(operation):
    for implementation in TARGETS.keys() & registry.implementations(operation).keys():
        with targeting(TARGETS[implementation]):
            assert any(
                registry.explain_case(operation, spec)[implementation] is None for spec in registry.specs(operation)
            )


def test_unknown_operation():
    with pytest.raises(ValueError, match="unknown operation 'softmax'; there are"):
        registry.specs("softmax")


def test_docs_list_every_operation():
    table = Path("docs/kernels.md").read_text().split("<!-- generated")[1]
    for operation in registry.operations():
        assert f"| {operation} | {', '.join(registry.implementations(operation))} |" in table
