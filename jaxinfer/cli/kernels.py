"""`jaxinfer info --kernels`: which implementation of every kernel operation runs here, and why the others do not."""

import contextlib
import json
import sys
from collections import Counter
from typing import Any

import click


def show_kernels(target: str | None, as_json: bool) -> None:
    """Prints the table: rich on a terminal, plain lines in a pipe, or JSON.

    Args:
        target: name of a device that need not be there; None is the device that jax would use.
        as_json: whether to print JSON.
    """
    found = kernel_report(target)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif sys.stdout.isatty():
        _print_table(found)
    else:
        click.echo(_heading(found))
        for operation, implementation, mark, text in _lines(found):
            click.echo(f"{operation:20}{implementation:14}{mark:8}{text}")


def kernel_report(target: str | None) -> dict[str, Any]:
    """Returns plain data: the device, and for every operation and case why each implementation declines it.

    Nothing runs. `reasons` is operation -> case -> implementation -> reason, null where it would take the case.
    """
    import jax

    from pallas_kernels import registry
    from pallas_kernels.dispatch import chosen
    from pallas_kernels.target import current_target

    with _device(target):
        reasons = {
            operation: {spec.name: registry.explain_case(operation, spec) for spec in registry.specs(operation)}
            for operation in registry.operations()
        }
        device = str(current_target())
    return {
        "jax": jax.__version__,
        "device": device,
        "chosen": {
            operation: {case: chosen(verdicts) for case, verdicts in cases.items()}
            for operation, cases in reasons.items()
        },
        "reasons": reasons,
    }


def _device(target: str | None) -> contextlib.AbstractContextManager[Any]:
    if target is None:
        return contextlib.nullcontext()
    from jaxinfer.compile_check.devices import DEVICES
    from jaxinfer.compile_check.topology import targeting

    return targeting(DEVICES[target])


def _heading(found: dict[str, Any]) -> str:
    return f"device {found['device']}, jax {found['jax']}; * is what is taken by itself"


def _lines(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Returns (operation, implementation, mark, what it does), one line an implementation."""
    lines = []
    for operation, cases in found["reasons"].items():
        taken = Counter(found["chosen"][operation].values())
        names = list(next(iter(cases.values()), {}))
        for name in names:
            declined = {case: verdicts[name] for case, verdicts in cases.items() if verdicts[name] is not None}
            mark = "*" if taken[name] == len(cases) else f"* {taken[name]}/{len(cases)}" if taken[name] else ""
            lines.append((operation, name, mark, _verdict(declined, len(cases))))
    return lines


def _verdict(declined: dict[str, str], num_cases: int) -> str:
    if not declined:
        return "runs here"
    by_reason: dict[str, list[str]] = {}
    for case, reason in declined.items():
        by_reason.setdefault(reason, []).append(case)
    if len(declined) == num_cases and len(by_reason) == 1:
        return f"declined: {next(iter(by_reason))}"
    reasons = "; ".join(f"{_some(cases)}: {reason}" for reason, cases in by_reason.items())
    runs = f"runs {num_cases - len(declined)} of {num_cases} cases; " if len(declined) < num_cases else ""
    return f"{runs}declined {reasons}"


def _some(cases: list[str]) -> str:
    return ", ".join(cases) if len(cases) <= 2 else f"{len(cases)} cases ({cases[0]}, ...)"


def _print_table(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=_heading(found), title_justify="left")
    for column in ("operation", "implementation", "taken", ""):
        table.add_column(column)
    last = ""
    for operation, implementation, mark, text in _lines(found):
        style = "green" if text.startswith("runs here") else "yellow" if text.startswith("runs") else "dim"
        table.add_row(operation if operation != last else "", implementation, mark, text, style=style)
        last = operation
    Console().print(table)
