"""The other process of a compile check: `python -m jaxinfer.compile_check PLAN.json ANSWER.json DUMP_FOLDER`.

The answer is written after every step, so that what was found survives a compiler that aborts.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(plan_file: str, answer_file: str, dump_folder: str) -> None:
    """Compiles the steps of a plan and writes what it finds."""
    answer: dict[str, Any] = {"steps": {}}

    def save(**news: Any) -> None:
        answer.update(news)
        Path(answer_file).write_text(json.dumps(answer))

    try:
        _check(Path(plan_file), Path(dump_folder), answer["steps"], save)
    except ImportError as missing:
        save(error=f"{sys.executable} lacks {missing.name or missing}: install it there (pip install {missing.name})")
    except (ValueError, NotImplementedError, ExceptionGroup) as refusal:
        save(error=_text(refusal))
    except RuntimeError as failure:  # the compiler's own errors: out of memory, shared memory, VMEM
        save(error=f"the compiler refused the {answer.get('current', 'step')}: {_text(failure)}")


def _check(plan_file: Path, dump: Path, steps: dict[str, Any], save: Any) -> None:
    import jax

    from jaxinfer.compile_check.measure import measure
    from jaxinfer.compile_check.plan import Plan
    from jaxinfer.compile_check.steps import engine_steps, fit_pages, weight_bytes_per_device
    from jaxinfer.compile_check.topology import abstract_mesh, real_mesh, using

    plan = Plan.from_json(plan_file.read_text())
    device, n = plan.device, plan.num_devices
    mesh = abstract_mesh(device, n) if plan.lower_only else real_mesh(device, n)
    num_pages = fit_pages(plan)
    save(jax=jax.__version__, weight_bytes=weight_bytes_per_device(plan), num_pages=num_pages)
    all_steps = list(engine_steps(plan, mesh, num_pages))  # outside the mesh: flax would place parameters by its names
    with using(mesh):
        for step in all_steps:
            save(current=f"{step.name} step")
            folder = dump / step.name
            folder.mkdir()
            os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
            start = time.perf_counter()
            lowered = step.lower(device.lowering_platform)
            found: dict[str, Any] = {
                "num_tokens": step.shape.num_tokens,
                "num_rows": step.shape.num_rows,
                "lower_s": time.perf_counter() - start,
            }
            if plan.lower_only:
                text = lowered.as_text()
                found["kernel_custom_calls"] = text.count("@mosaic_gpu") + text.count("@tpu_custom_call")
            else:
                found |= measure(lowered, device, folder if device.platform == "gpu" else None)
            steps[step.name] = found
            save()


def _text(error: BaseException) -> str:
    lines = [str(error), *(f"- {_text(inner)}" for inner in getattr(error, "exceptions", ()))]
    return "\n".join(lines) or type(error).__name__


if __name__ == "__main__":
    main(*sys.argv[1:])
