"""What the prefix cache saves: W4 (a shared prefix) and a conversation, with it and without, in turn.

python scripts/bench_prefix.py --workloads workloads.json --repeats 3
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.workloads import BenchRequest, read_workloads

QUESTIONS = (
    "What is a prefix tree? Explain it to somebody who knows what a list is.",
    "How much memory does it take?",
    "How would you write it in Python?",
    "Can you make it faster?",
    "What are its limits?",
    "Summarise this conversation in two sentences.",
)
ANSWER = 96  # tokens


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: seconds, and what the engine counted."""

    total_s: float
    ttft_s: float  # mean
    prefill_tokens: int
    prompt_tokens: int
    hit_rate: float
    token_ids: tuple[tuple[int, ...], ...]


def shared_prefix(llm: LLM, requests: list[BenchRequest]) -> Run:
    prompts = [request.prompt for request in requests]
    params = [SamplingParams(temperature=0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests]
    return measure(llm, lambda: llm.generate(prompts, params))


def conversation(llm: LLM) -> Run:
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)

    def talk() -> list:
        messages, outputs = [], []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            outputs += llm.chat(messages, params)
            messages.append({"role": "assistant", "content": outputs[-1].outputs[0].text})
        return outputs

    return measure(llm, talk)


def measure(llm: LLM, work) -> Run:
    llm.reset_prefix_cache()
    before, start = llm.stats(), time.perf_counter()
    outputs = work()
    total, after = time.perf_counter() - start, llm.stats()
    queried = after.prefix_cache.num_query_tokens - before.prefix_cache.num_query_tokens
    found = after.prefix_cache.num_hit_tokens - before.prefix_cache.num_hit_tokens
    return Run(
        total,
        statistics.mean(o.metrics.first_token - o.metrics.arrival for o in outputs),
        after.num_prefill_tokens - before.num_prefill_tokens,
        sum(len(o.prompt_token_ids) for o in outputs),
        found / max(1, queried),
        tuple(tuple(o.outputs[0].token_ids) for o in outputs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--workload-model", default="SmolLM2-135M-Instruct", help="key in the workload file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", nargs="+", choices=("W4", "chat"), default=["W4", "chat"])
    parser.add_argument("--limit", type=int, help="only so many requests of W4")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    requests = read_workloads(args.workloads, args.workload_model)["W4"][: args.limit]
    first = LLM(args.model)
    llms = {True: first, False: LLM(first.model, prefix_cache=False)}
    for name in args.only:
        work = conversation if name == "chat" else lambda llm: shared_prefix(llm, requests)
        runs: dict[bool, list[Run]] = {True: [], False: []}
        for _ in range(1 + args.repeats):  # the first compiles
            for cached, llm in llms.items():
                runs[cached].append(work(llm))
        equal = len({run.token_ids for both in runs.values() for run in both}) == 1
        on, off = runs[True][-1], runs[False][-1]
        print(f"{name}: {on.prompt_tokens} prompt tokens, equal outputs: {equal}")
        print(f"  prefill tokens computed  {off.prefill_tokens} without, {on.prefill_tokens} with the cache")
        print(f"  hit rate                 {on.hit_rate:.1%}")
        for field in ("ttft_s", "total_s"):
            without, with_ = (statistics.median(getattr(run, field) for run in runs[c][1:]) for c in (False, True))
            print(f"  {field:24} {without:.3f} without, {with_:.3f} with: {without / with_:.2f}x")


if __name__ == "__main__":
    main()
