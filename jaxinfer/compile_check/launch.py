"""Runs a compile check in another process: a compiler may abort it, and may need another environment."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxinfer.compile_check.plan import Plan

PACKAGES = ("jaxinfer", "pallas_kernels", "sharding", "checkpoints")
_TAIL = 12  # lines of a compiler's last words that are shown


def run_check(plan: Plan, python: str | None = None, timeout: float | None = None) -> dict[str, Any]:
    """Returns what `jaxinfer.compile_check.__main__` found.

    Args:
        plan: what to compile.
        python: interpreter of an environment with the compiler plugin; None takes this one.
        timeout: seconds after which the compilation is given up.

    Raises:
        ValueError: the environment lacks something, the plan does not fit the device, or the compiler refuses it.
        RuntimeError: the compiler's process died.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "plan.json").write_text(plan.to_json())
        (home / "dump").mkdir()
        paths = [str(home / name) for name in ("plan.json", "answer.json", "dump")]
        code, stderr = run_child(["-m", "jaxinfer.compile_check", *paths], python, home, timeout)
        answer_file = home / "answer.json"
        answer = json.loads(answer_file.read_text()) if answer_file.exists() else {}
    if "error" in answer:
        raise ValueError(answer["error"])
    if code != 0:
        raise RuntimeError(_last_words(plan.target, answer.get("current", "start"), code, stderr))
    return answer


def run_child(
    arguments: list[str], python: str | None, home: Path, timeout: float | None = None, packages: Path | None = None
) -> tuple[int, str]:
    """Runs a Python of a compiler environment with our packages, and no others of ours, on its path.

    Args:
        arguments: after the interpreter.
        python: the interpreter; None is this one.
        home: an empty folder for links to our packages.
        timeout: seconds.
        packages: where our packages lie; None finds them.

    Returns:
        Exit code (negative: the signal that ended it) and standard error.
    """
    source = packages or Path(__file__).resolve().parents[2]
    links = home / "packages"
    links.mkdir()
    for name in PACKAGES:
        (links / name).symlink_to(source / name)
    env = os.environ | {
        "PYTHONPATH": str(links),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    env.pop("XLA_FLAGS", None)  # of this process, such as a number of CPU devices
    try:
        done = subprocess.run(
            [python or sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=timeout
        )
    except FileNotFoundError:
        raise ValueError(f"there is no Python at {python}; give the interpreter of an environment") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the compilation took more than {timeout:.0f} s and was given up") from None
    return done.returncode, done.stderr


def _last_words(target: str, where: str, code: int, stderr: str) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    hint = ""
    if code == -signal.SIGABRT:
        hint = f": it aborts for a kernel that it cannot compile for {target} (Mosaic GPU needs sm_90 or newer)"
    elif code == -signal.SIGKILL:
        hint = ": probably this machine ran out of memory"
    words = "\n".join(stderr.strip().splitlines()[-_TAIL:])
    return f"the compiler's process {how} at the {where}{hint}" + (f"; its last words:\n{words}" if words else "")
