"""Compiles every case of every kernel for H200 and TPU v5e, without either, and writes what the compilers say.

    python scripts/kernel_table.py --cuda-python cuda/bin/python --tpu-python tpu/bin/python

writes docs/kernels-compiled.md and docs/kernels-compiled.json. `jaxinfer compile-check` says how to make the
environments. Nothing is measured: these are registers, memory and occupancy, not times.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxinfer.compile_check.cases import Case, compile_cases
from jaxinfer.compile_check.devices import DEVICES
from pallas_kernels import registry

BACKENDS = {"mosaic_gpu": "h200", "mosaic_tpu": "v5e"}
HEADING = """# What the compilers say of the kernels

Written by `scripts/kernel_table.py` with jax {version}; do not edit. **Nothing here was measured on hardware**: the
kernels were compiled to machine code for devices that were not there.
"""
GPU_HEAD = (
    "operation / case", "kernel", "registers", "spills B", "smem KiB", "threads", "blocks/SM", "limited by", "code KiB"
)  # fmt: skip
TPU_HEAD = ("operation / case", "kernel", "calls", "VMEM KiB", "temporaries KiB")


def cases_for(implementation: str, operations: list[str]) -> list[Case]:
    return [
        (operation, spec.name)
        for operation in operations
        if implementation in registry.implementations(operation)
        for spec in registry.specs(operation)
    ]


def gpu_rows(name: str, result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name, kernel["name"], str(kernel["registers"]), str(kernel["spill_stores"] + kernel["spill_loads"]),
            f"{kernel['shared_memory'] / 1024:.1f}", str(kernel["threads"]), str(kernel["blocks_per_core"]),
            kernel["limited_by"], "n/a" if kernel["code_bytes"] is None else f"{kernel['code_bytes'] / 1024:.1f}",
        ]
        for kernel in result["kernels"]
    ]  # fmt: skip


def tpu_rows(name: str, result: dict[str, Any]) -> list[list[str]]:
    temporaries = f"{result['memory']['temp'] / 1024:.1f}"
    return [
        [name, kernel, str(calls), _kib(result["vmem_bytes"].get(kernel)), temporaries]
        for kernel, calls in result["kernel_calls"].items()
    ]


def _kib(size: int | None) -> str:
    return "not reported" if size is None else f"{size / 1024:.1f}"


def markdown(found: dict[str, list[tuple[Case, dict[str, Any]]]], missing: list[str]) -> str:
    parts = [HEADING.format(version=jax.__version__)]
    for implementation, results in found.items():
        device = DEVICES[BACKENDS[implementation]]
        head, rows_of = (GPU_HEAD, gpu_rows) if device.platform == "gpu" else (TPU_HEAD, tpu_rows)
        rows, notes = [], []
        for (operation, name), result in results:
            title = name if name.startswith(operation) else f"{operation}/{name}"
            if bad := next((key for key in ("declined", "error") if key in result), None):
                notes.append(f"- {title}: {bad}: {' '.join(result[bad].split())[:300]}")
            elif not (new := rows_of(title, result)):
                notes.append(f"- {title}: compiled, but holds no Pallas kernel")
            else:
                rows += new
        parts.append(f"## {implementation} for {device.kind}\n")
        table = [head, ["---"] * len(head), *rows]
        parts += ["| " + " | ".join(row) + " |" for row in table]
        if device.platform == "gpu":
            spilled = sum(row[3] != "0" for row in rows)
            parts.append(f"\n{len(rows)} kernels, {spilled} with spills; shared memory at most "
                         f"{device.shared_memory_per_block / 1024:.0f} KiB a block.")  # fmt: skip
        parts += ["\nNot in the table:\n", *notes] if notes else []
        parts.append("")
    parts += [f"{implementation} was not compiled: no environment was given.\n" for implementation in missing]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda-python", help="interpreter with jax-cuda13-plugin")
    parser.add_argument("--tpu-python", help="interpreter with libtpu")
    parser.add_argument("--only", nargs="+", choices=registry.operations(), help="only these operations")
    parser.add_argument("--match", default="", help="only cases whose name has this in it")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for each case")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder to write into")
    args = parser.parse_args()
    pythons = {"mosaic_gpu": args.cuda_python, "mosaic_tpu": args.tpu_python}
    if not any(pythons.values()):
        parser.error("give --cuda-python, --tpu-python or both")
    operations = args.only or list(registry.operations())
    found = {}
    for implementation, python in pythons.items():
        if python:
            cases = [case for case in cases_for(implementation, operations) if args.match in case[1]]
            target = BACKENDS[implementation]
            results = compile_cases(target, implementation, cases, python, args.timeout, tell=print)
            found[implementation] = list(zip(cases, results))
    args.out.mkdir(exist_ok=True)
    missing = [implementation for implementation, python in pythons.items() if not python]
    (args.out / "kernels-compiled.md").write_text(markdown(found, missing))
    data = {
        implementation: [{"operation": o, "case": c} | result for (o, c), result in results]
        for implementation, results in found.items()
    }
    (args.out / "kernels-compiled.json").write_text(json.dumps({"jax": jax.__version__} | data, indent=1) + "\n")
    failed = [case for results in found.values() for case, result in results if "error" in result]
    print(f"{len(failed)} of {sum(map(len, found.values()))} cases failed to compile: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
