"""One prepared run on a GPU machine: numerics of every kernel, then speed. About 8 minutes; writes JSON and Markdown.

    python scripts/gpu_check.py --out gpu-check            # on an H200; nothing is downloaded
    python scripts/gpu_check.py --dry-run --out /tmp/dry   # tiny sizes on CPU: tests the script itself

Each section runs in a process of its own with a budget. An item that fails is a result; one that hangs or takes the
process down is recorded, and the section goes on in a new process. Files are written after every item.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# name: (seconds, seconds an item may take before its process is ended); the most valuable first
SECTIONS = {
    "roofs": (30, 25),
    "numerics": (110, 40),
    "decode": (50, 35),
    "flash": (50, 35),
    "quantized": (40, 35),
    "engine": (150, 140),
    "specs": (30, 25),
}
POLL = 0.2


def section_items(section: str, dry_run: bool) -> Any:
    from jaxinfer.bench.gpu import engine, numerics, speed

    items = {
        "roofs": speed.roof_items, "numerics": numerics.items, "decode": speed.decode_items,
        "flash": speed.flash_items, "quantized": speed.quantized_items, "engine": engine.items,
        "specs": speed.spec_items,
    }  # fmt: skip
    return items[section](dry_run)


def child(section: str, log: Path, dry_run: bool) -> None:
    """Runs the items that the log does not have yet, and appends a line before and after each."""
    done = {entry["item"] for entry in read_log(log)}
    with log.open("a") as file:

        def write(entry: dict[str, Any]) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        for name, run in section_items(section, dry_run):
            if name in done:
                continue
            write({"start": name})
            begin = time.perf_counter()
            try:
                result = run()
            except NotImplementedError as reason:
                result = {"declined": str(reason)}
            except Exception as failure:  # a result like any other
                result = {"error": f"{type(failure).__name__}: {failure}"[:600]}
            write({"item": name, "result": result | {"wall_s": time.perf_counter() - begin}})


def read_log(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [entry for line in lines if "item" in (entry := json.loads(line))]


def running_item(log: Path) -> str | None:
    lines = log.read_text().splitlines() if log.exists() else []
    return json.loads(lines[-1]).get("start") if lines else None


def run_section(section: str, budget: float, item_limit: float, out: Path, dry_run: bool) -> dict[str, Any]:
    """Returns the section's results; starts its process again after an item that ended it."""
    log, deadline = out / f"{section}.jsonl", time.monotonic() + budget
    log.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--child", section, "--out", str(out), *(["--dry-run"] if dry_run else [])]
    note = ""
    while True:
        with (out / f"{section}.err").open("w") as errors:
            process = subprocess.Popen(command, stderr=errors)
        last_change, last_size, why = time.monotonic(), -1, ""
        while process.poll() is None:
            time.sleep(POLL)
            now, size = time.monotonic(), log.stat().st_size if log.exists() else 0
            if size != last_size:
                last_change, last_size = now, size
            if now > deadline:
                why = "the section's time was up"
            elif now - last_change > item_limit:
                why = f"took more than {item_limit:.0f} s"
            if why:
                process.kill()
                process.wait()
        if process.returncode == 0:
            break
        item = running_item(log)
        words = (out / f"{section}.err").read_text().strip().splitlines()[-3:]
        why = why or f"ended the process with code {process.returncode}: {' | '.join(words)}"
        if item is None:
            note = f"no further item could start: {why}"
            break
        with log.open("a") as file:
            file.write(json.dumps({"item": item, "result": {"error": why[:600]}}) + "\n")
        if time.monotonic() > deadline:
            note = "the time was up before all items had run"
            break
    results = {entry["item"]: entry["result"] for entry in read_log(log)}
    return {"results": results} | ({"note": note} if note else {})


def machine() -> dict[str, str]:
    """Returns card, driver and versions, without starting a GPU program in this process."""
    from importlib import metadata

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"]
    try:
        card = (
            subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip() or "nvidia-smi is silent"
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        card = "no nvidia-smi"
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "torch")
    return {"card": card, "python": platform.python_version(), "cores": str(os.cpu_count())} | {
        name: version(name) for name in packages
    }


def markdown(found: dict[str, Any]) -> str:
    what = "DRY RUN on CPU: the numbers mean nothing." if found["dry_run"] else "Measured on this machine."
    lines = [f"# GPU check\n\n{what}\n"]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items()]
    roofs = found["sections"].get("roofs", {}).get("results", {})
    bandwidth = roofs.get("copy", {}).get("bytes_per_s")
    peak = max((roof.get("flops_per_s", 0) for name, roof in roofs.items() if "matmul" in name), default=0)
    for section, content in found["sections"].items():
        lines += [f"\n## {section}\n", *([content["note"] + "\n"] if "note" in content else [])]
        lines += ["| item | result |", "| --- | --- |"]
        lines += [f"| {item} | {describe(result, bandwidth, peak)} |" for item, result in content["results"].items()]
    return "\n".join(lines) + "\n"


def describe(result: dict[str, Any], bandwidth: float | None, peak: float) -> str:
    """Returns one cell: rates beside the measured roofs."""
    for bad in ("error", "declined"):
        if bad in result:
            return f"{bad}: {result[bad]}".replace("\n", " ").replace("|", "/")[:300]
    parts = []
    if "ok" in result:
        state = "ok" if result["ok"] else "WRONG" if result["bit_equal"] else "NOT DETERMINISTIC or wrong"
        parts.append(f"{state}, differs by {result['difference']:.1e} of the largest value from {result['against']}")
    if "us" in result:
        parts.append(f"{result['us']:.1f} us ± {result['spread'] * 50:.0f} %")
    if "flops_per_s" in result:
        share = f" ({result['flops_per_s'] / peak:.0%} of the measured bf16 peak)" if peak else ""
        parts.append(f"{result['flops_per_s'] / 1e12:.1f} TFLOP/s{share}")
    if "bytes_per_s" in result:
        share = f" ({result['bytes_per_s'] / bandwidth:.0%} of the measured copy)" if bandwidth else ""
        parts.append(f"{result['bytes_per_s'] / 1e9:.0f} GB/s{share}")
    known = {"ok", "difference", "against", "bit_equal", "us", "spread", "runs", "flops_per_s", "bytes_per_s", "wall_s"}
    parts += [f"{name} {value:.4g}" for name, value in result.items() if name not in known]
    return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--child", choices=SECTIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if args.child:
        child(args.child, args.out / f"{args.child}.jsonl", args.dry_run)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    found: dict[str, Any] = {"dry_run": args.dry_run, "machine": machine(), "sections": {}}
    for section in args.only:
        budget, item_limit = (600, 300) if args.dry_run else SECTIONS[section]
        found["sections"][section] = run_section(section, budget, item_limit, args.out, args.dry_run)
        found["seconds"] = time.monotonic() - begin
        (args.out / "gpu_check.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.out / "gpu_check.md").write_text(markdown(found))
        print(
            f"{section}: {len(found['sections'][section]['results'])} items, {found['seconds']:.0f} s so far",
            flush=True,
        )
    print(markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
