"""What the host tier saves: conversations that together need several times the device's pages, and their second turns.

python scripts/bench_offload.py --conversations 12 --tokens 512
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.page_transfer import PageTransfer
from jaxinfer.model.kv_cache import KVCache

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Run:
    """Second turns of all conversations, one after the other."""

    ttft_s: float  # median
    prefill_tokens: int
    pages_in: int
    token_ids: tuple[tuple[int, ...], ...]


def second_turns(llm: LLM, prompts: list[list[int]]) -> Run:
    llm.reset_prefix_cache()
    answers = [llm.generate(prompt, PARAMS)[0].outputs[0].token_ids for prompt in prompts]
    before = llm.stats()
    turns = [[*prompt, *answer, 198, 198] for prompt, answer in zip(prompts, answers)]
    outputs = [llm.generate(turn, PARAMS)[0] for turn in turns]
    after = llm.stats()
    return Run(
        statistics.median(o.metrics.first_token - o.metrics.arrival for o in outputs),
        after.num_prefill_tokens - before.num_prefill_tokens,
        after.tiers.num_pages_in - before.tiers.num_pages_in,
        tuple(tuple(o.outputs[0].token_ids) for o in outputs),
    )


def measure_moves(llm: LLM, count: int) -> None:
    """Prints what a page costs on its way out and in, `count` at a time, waiting for each."""
    kv = llm.engine.config.kv_spec(jnp.dtype(llm.model.spec.dtype))
    cache = KVCache.init(llm.model.config, 1 + count, llm.engine.config.page_size, kv)
    pages, numbers = (cache.k_pages, cache.v_pages), list(range(1, 1 + count))
    transfer = PageTransfer(pages)
    times: dict[str, list[float]] = {"out": [], "in": []}
    for _ in range(8):
        start = time.perf_counter()
        saved = jax.block_until_ready(transfer.save(pages, numbers))
        middle = time.perf_counter()
        pages = jax.block_until_ready(transfer.load(pages, [transfer.upload(page) for page in saved], numbers))
        times["out"].append(middle - start)
        times["in"].append(time.perf_counter() - middle)
    for way, seconds in times.items():
        page = statistics.median(seconds[1:]) / count  # the first compiles
        print(f"  a page {way:3}  {page * 1e6:8.0f} us, {transfer.page_bytes / page / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="of each first prompt")
    parser.add_argument("--times", type=float, default=4, help="how much larger all contexts are than the pool")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv", default="auto")
    args = parser.parse_args()
    each = -(-(args.tokens + 64) // 64) * 64
    num_pages = 1 + int(args.conversations * (args.tokens + PARAMS.max_tokens + 2) / args.times) // 16
    options = {"num_pages": num_pages, "max_model_len": each, "max_num_seqs": 1, "kv_dtype": args.kv, "page_size": 16}
    tiered = LLM(args.model, **options, host_cache_bytes=2 << 30)
    llms = {True: tiered, False: LLM(tiered.model, **options)}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 40000, args.tokens).tolist() for _ in range(args.conversations)]
    runs: dict[bool, list[Run]] = {True: [], False: []}
    for llm in llms.values():
        second_turns(llm, prompts[:1])  # compiles
    for _ in range(args.repeats):
        for kind, llm in llms.items():
            runs[kind].append(second_turns(llm, prompts))
    on, off = runs[True][-1], runs[False][-1]
    equal = len({run.token_ids for both in runs.values() for run in both}) == 1
    pool = (num_pages - 1) * 16
    print(f"{args.conversations} contexts of {args.tokens} tokens, a pool of {pool}; equal outputs: {equal}")
    print(f"  prefill tokens  {off.prefill_tokens} without, {on.prefill_tokens} with the host tier")
    with_, without = (statistics.median(run.ttft_s for run in runs[kind]) for kind in (True, False))
    print(f"  TTFT            {without * 1e3:.0f} ms without, {with_ * 1e3:.0f} ms with: {without / with_:.1f}x")
    print(f"  pages loaded    {on.pages_in}")
    measure_moves(tiered, 8)


if __name__ == "__main__":
    main()
