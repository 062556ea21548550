"""The same workloads through llama-cpp-python, in an environment of its own; JSON as of bench_offline.py.

    PYTHONPATH=. python scripts/bench_llamacpp.py --gguf model.gguf --workloads workloads.json --json llamacpp.json

llama-cpp-python has no continuous batching: the requests of a workload run one after the other. Only the parts of
jaxinfer.bench that import no jax are used.
"""

import argparse
import json
import time
from pathlib import Path

import llama_cpp

from jaxinfer.bench.metrics import Trace, median_of, summarize
from jaxinfer.bench.report import markdown_table
from jaxinfer.bench.workloads import BenchRequest, read_workloads


def run(llama: llama_cpp.Llama, requests: list[BenchRequest]) -> list[Trace]:
    """Runs the requests one after the other; all count as having arrived at the start."""
    start, traces = time.perf_counter(), []
    for request in requests:
        trace = Trace(start, len(request.prompt))
        llama.reset()
        for _ in llama.generate(request.prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            trace.tokens.append(time.perf_counter())
            if len(trace.tokens) == request.max_tokens:
                break
        traces.append(trace)
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--workload-model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--only", nargs="+", default=["W1", "W2", "W3"])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    llama = llama_cpp.Llama(str(args.gguf), n_threads=args.threads, n_ctx=4096, n_batch=512, verbose=False)
    load = time.perf_counter() - start
    results = {}
    for name in args.only:
        requests = read_workloads(args.workloads, args.workload_model, args.limit)[name]
        alone = name in ("W1", "W2")
        run(llama, requests[:1])
        results[name] = median_of(
            [summarize(run(llama, [requests[i % len(requests)]] if alone else requests)) for i in range(args.repeats)]
        )
        print(markdown_table(results), flush=True)
    if args.json:
        system = {"engine": f"llama-cpp-python {llama_cpp.__version__}", "load_s": load}
        args.json.write_text(json.dumps({"system": system, "results": results}, indent=2))


if __name__ == "__main__":
    main()
