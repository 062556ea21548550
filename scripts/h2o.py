"""What H2O costs in accuracy: budgets of 20 % and 50 % against all keys and against recent keys alone.

python scripts/h2o.py --passages 8 --context 1536 --continuation 256 --json out.json

Every passage is a request whose prompt is the context and whose answer is known: the engine replays it token by token,
as after a preemption, under the budget. What is compared are the next-token distributions of the continuation.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench.accuracy import Accuracy, Passage, compare
from jaxinfer.cli.bench.accuracy import find_text
from jaxinfer.engine.admission import make_requests
from jaxinfer.sampling.h2o import H2O

SHARES = (0.2, 0.5)


@dataclasses.dataclass(frozen=True)
class Row:
    """One budget: its accuracy, and the tokens and pages that a request holds while it answers."""

    name: str
    tokens: int
    pages: int
    accuracy: Accuracy


def budgets(context: int) -> dict[str, H2O | None]:
    """Returns the budgets of a context; half of each goes to heavy hitters, as in the paper."""
    found: dict[str, H2O | None] = {"all keys": None}
    for share in SHARES:
        tokens = round(share * context)
        found[f"H2O, {share:.0%}"] = H2O(tokens - tokens // 2, tokens // 2)
        found[f"recent keys, {share:.0%}"] = H2O(0, tokens)
    return found


def replay(llm: LLM, passages: list[Passage], h2o: H2O | None) -> tuple[list[np.ndarray], int]:
    """Returns f[n - first, D] of each passage, and the most pages that a request held after its prompt."""
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, h2o=h2o)
    hidden = {}
    for i, passage in enumerate(passages):
        prompt, answer = passage.token_ids[: passage.first], passage.token_ids[passage.first :]
        [request] = make_requests(
            llm.model, str(i), prompt, params, 0, None, engine.max_model_len, np.random.default_rng(0)
        )
        request.output_token_ids += answer[:-1]
        request.max_tokens = len(answer)
        hidden[request] = np.zeros((len(passage.token_ids) - 1, llm.model.config.hidden_size), np.float32)
        engine.scheduler.add(request)
    pages = 0
    while engine.scheduler.has_unfinished:
        step = engine.scheduler.schedule()
        for request in step.admitted:
            engine.runner.install(request)
        output = engine.runner.dispatch(step).output
        states = np.asarray(output.hidden, np.float32).reshape(-1, llm.model.config.hidden_size)
        end = 0
        for row in step.rows:
            begin, end = end, end + row.num_tokens
            hidden[row.request][row.start : row.start + row.num_tokens] = states[begin:end]
            if row.start + row.num_tokens > row.request.num_prompt_tokens:
                pages = max(pages, len(row.request.pages))
        tokens = np.asarray(output.token_ids)
        engine.scheduler.update(step, [tokens[: row.num_samples, i].tolist() for i, row in enumerate(step.rows)])
    return [states[passage.first - 1 :] for states, passage in zip(hidden.values(), passages)], pages


def cut(token_ids: list[int], context: int, continuation: int, count: int) -> list[Passage]:
    """Returns passages that do not overlap."""
    length = context + continuation
    starts = range(0, min(len(token_ids) - length + 1, count * length), length)
    return [Passage(token_ids[start : start + length], context) for start in starts]


def table(rows: list[Row], context: int) -> str:
    lines = [
        "| | tokens kept | pages a request | perplexity | against all keys | same top token | KL, nats |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        a = row.accuracy
        lines.append(
            f"| {row.name} | {row.tokens or context} | {row.pages} | {a.perplexity:.2f} "
            f"| {100 * a.perplexity_change:+.1f} % | {100 * a.top1:.1f} % | {a.kl:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, help="by default the news of `jaxinfer bench accuracy`")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--context", type=int, default=1536)
    parser.add_argument("--continuation", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM(
        options.model, h2o=True, prefix_cache=False, max_num_seqs=options.passages, decode_steps=1,
        max_model_len=options.context + options.continuation + 16,
    )  # fmt: skip
    words = llm.tokenizer.encode((options.text or find_text()).read_text(encoding="utf-8"))
    passages = cut(words, options.context, options.continuation, options.passages)
    rows, reference = [], []
    for name, h2o in budgets(options.context).items():
        hidden, pages = replay(llm, passages, h2o)
        reference = reference or hidden
        accuracy = compare(llm.model, reference, llm.model, hidden, passages)
        rows.append(Row(name, h2o.budget if h2o else 0, pages, accuracy))
        print(f"{name}: perplexity {accuracy.perplexity:.3f}", flush=True)
    print("\n" + table(rows, options.context))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
