"""Runs workloads W1 to W4 (and W6) through the engine and prints latencies, throughput, start-up and memory.

python scripts/bench_offline.py --workloads workloads.json --only W1 W2 --repeats 3 --json ours.json
"""

import time

START = time.perf_counter()

import argparse
import json
import resource
from pathlib import Path

import jax

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.metrics import Trace, median_of, summarize
from jaxinfer.bench.report import markdown_table, ratio_table
from jaxinfer.bench.workloads import OFFLINE, BenchRequest, read_workloads

IMPORTED = time.perf_counter()


def run(llm: LLM, requests: list[BenchRequest]) -> list[Trace]:
    """Submits all requests at once and records when each token arrives; nothing is cached from the run before."""
    llm.reset_prefix_cache()
    engine, traces = llm.engine, {}
    for i, request in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
        traces[str(i)] = Trace(time.perf_counter(), len(request.prompt))
        engine.add_request(str(i), request.prompt, params)
    while engine.has_work:
        for chunk in engine.step():
            traces[chunk.request_id].tokens += [time.perf_counter()] * len(chunk.token_ids)
    for i in traces:
        engine.pop_output(i)
    return list(traces.values())


def bench(llm: LLM, name: str, requests: list[BenchRequest], repeats: int) -> dict[str, float]:
    """Returns the medians of a workload; W1 and W2 are single streams, one request after the other."""
    alone = name in ("W1", "W2")
    run(llm, requests[:1] if alone else requests)  # compiles the shapes and warms the caches
    runs = []
    for i in range(repeats):
        runs.append(summarize(run(llm, [requests[i % len(requests)]] if alone else requests)))
        print(f"  {name} run {i + 1}/{repeats}: {runs[-1]['total_s']:.2f} s", flush=True)
    return median_of(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--workload-model", default="SmolLM2-135M-Instruct", help="key in the workload file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="+", choices=OFFLINE, default=["W1", "W2", "W3", "W4"])
    parser.add_argument("--limit", type=int, help="only so many requests of each workload")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-compile-cache", action="store_true", help="compile everything: a cold start")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--against", type=Path, help="JSON of a peer: print how many times faster we are")
    for name, default in (
        ("max-num-seqs", 64),
        ("max-num-batched-tokens", 512),
        ("decode-steps", 4),
        ("page-size", 16),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("dtype", "quantize", "activations"):
        parser.add_argument(f"--{name}", help="as load has it")
    args = parser.parse_args()

    workloads = read_workloads(args.workloads, args.workload_model, args.limit)
    start = time.perf_counter()
    llm = LLM(
        args.model, dtype=args.dtype, quantize=args.quantize, activations=args.activations,
        compile_cache=not args.no_compile_cache, max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens, decode_steps=args.decode_steps, page_size=args.page_size,
    )  # fmt: skip
    loaded = time.perf_counter()
    run(llm, [BenchRequest(workloads["W1"][0].prompt, 1)])
    first_token = time.perf_counter()
    results = {name: bench(llm, name, workloads[name], args.repeats) for name in args.only}
    stats = llm.stats()
    system = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "import_s": IMPORTED - START,
        "load_s": loaded - start,
        "start_to_first_token_s": first_token - START,
        "compile_s": stats.compile.seconds,
        "compiled_shapes": stats.compile.num_compiled,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print("\n" + markdown_table(results) + "\n")
    for name, value in system.items():
        print(f"{name:24}{value:.2f}" if isinstance(value, float) else f"{name:24}{value}")
    if args.json:
        args.json.write_text(json.dumps({"system": system, "results": results}, indent=2))
    if args.against:
        print("\n" + ratio_table(results, json.loads(args.against.read_text())["results"]))


if __name__ == "__main__":
    main()
