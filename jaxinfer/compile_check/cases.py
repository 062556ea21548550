"""Compiles named cases of the kernels: `python -m jaxinfer.compile_check.cases REQUEST ANSWER DUMP_FOLDER`.

`compile_cases` starts it and starts it again after a case that ended the process.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.compile_check.launch import run_child

type Case = tuple[str, str]  # operation, name of the case


def compile_cases(
    target: str, implementation: str, cases: Sequence[Case], python: str | None, timeout: int = 600,
    tell: Callable[[str], None] = lambda _: None, packages: Path | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns for each case what `measure` found, or {"declined": reason}, or {"error": text}.

    Args:
        target: name in `DEVICES`.
        implementation: to compile, such as "mosaic_gpu".
        cases: what to compile.
        python: interpreter with the compiler plugin; None is this one.
        timeout: seconds for each case; the process that takes longer is ended and the next case tried.
        tell: called with a line of progress.
        packages: where our packages lie; None takes those of this process.

    Raises:
        RuntimeError: the process ended before its first case.
    """
    results: dict[Case, dict[str, Any]] = {}
    while left := [case for case in cases if case not in results]:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            request = {"target": target, "implementation": implementation, "cases": left, "timeout": timeout}
            (home / "request.json").write_text(json.dumps(request))
            (home / "dump").mkdir()
            paths = [str(home / name) for name in ("request.json", "answer.json", "dump")]
            arguments = ["-m", "jaxinfer.compile_check.cases", *paths]
            code, stderr = run_child(arguments, python, home, packages=packages)
            answer = home / "answer.json"
            found = json.loads(answer.read_text()) if answer.exists() else []
        for operation, name, result in found:
            results[operation, name] = result
            tell(f"{implementation} {name}: {summary(result)}")
        if code != 0 and len(found) < len(left):
            words = "\n".join(stderr.strip().splitlines()[-6:])
            if not found and "\x00started" not in stderr:
                raise RuntimeError(f"the compiler's process ended with code {code} before its first case:\n{words}")
            slow = code == -signal.SIGALRM
            text = f"took more than {timeout} s" if slow else f"the process ended with code {code}: {words}"
            results[left[len(found)]] = {"error": text}
            tell(f"{implementation} {left[len(found)][1]}: ended the process")
    return [results[case] for case in cases]


def summary(result: dict[str, Any]) -> str:
    """Returns a few words on a result."""
    for bad in ("declined", "error"):
        if bad in result:
            return f"{bad}: {result[bad].splitlines()[0][:120]}"
    return f"compiled in {result['compile_s']:.1f} s"


def main(request_file: str, answer_file: str, dump_folder: str) -> None:
    """Compiles the cases of a request and writes the results after each."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxinfer.compile_check.devices import DEVICES
    from jaxinfer.compile_check.measure import measure
    from jaxinfer.compile_check.topology import real_mesh, using
    from pallas_kernels import registry

    request = json.loads(Path(request_file).read_text())
    device = DEVICES[request["target"]]
    mesh = real_mesh(device, 1)
    print("\x00started", file=sys.stderr, flush=True)
    everywhere = NamedSharding(mesh, PartitionSpec())
    answer: list[tuple[str, str, dict[str, Any]]] = []

    def compile_case(operation: str, name: str, dump: Path) -> dict[str, Any]:
        spec = registry.find_spec(operation, name)
        shapes = jax.eval_shape(spec.arguments)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), shapes)

        def call(*arguments: Any) -> Any:
            return spec.function(*arguments, implementation=request["implementation"])

        start = time.perf_counter()
        with using(mesh):
            lowered = jax.jit(call).trace(*shapes).lower(lowering_platforms=(device.lowering_platform,))
            lower_s = time.perf_counter() - start
            return {"lower_s": lower_s} | measure(lowered, device, dump if device.platform == "gpu" else None)

    for number, (operation, name) in enumerate(request["cases"]):
        dump = Path(dump_folder) / str(number)
        dump.mkdir()
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
        signal.alarm(request["timeout"])
        try:
            result = compile_case(operation, name, dump)
        except NotImplementedError as reason:
            result = {"declined": str(reason)}
        except Exception as failure:  # a kernel that does not compile is a result, and the next one is tried
            result = {"error": f"{type(failure).__name__}: {failure}"[:2000]}
        answer.append((operation, name, result))
        Path(answer_file).write_text(json.dumps(answer))
        for file in dump.glob("*"):
            file.unlink()  # the logs of the compiler's passes are large


if __name__ == "__main__":
    main(*sys.argv[1:])
