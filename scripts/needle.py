"""Needle retrieval: a pass key hidden in a long text, asked for at its end, for several precisions of the KV cache.

python scripts/needle.py --lengths 2048 4096 8000 --kv float32 int8 int4 int2

Every prompt is news text of `length` tokens with one sentence at `depth` of it that names a pass key of five digits.
A key is found if the greedy answer begins with it. The first precision is what the others' answers are compared with.
"""

import argparse
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

from jaxinfer import LLM, SamplingParams, load
from jaxinfer.cli.bench.accuracy import find_text
from jaxinfer.kv_spec import KVSpec
from jaxinfer.tokenizer import Tokenizer

NEEDLE = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
ANSWER = 8  # tokens


@dataclasses.dataclass(frozen=True)
class Haystack:
    """A prompt of `length` tokens with `key` at `depth`, from 0 (its beginning) to 1 (its end)."""

    length: int
    depth: float
    key: str
    prompt: list[int]


def make_haystacks(
    text: str, tokenizer: Tokenizer, lengths: Sequence[int], depths: Sequence[float], seed: int = 0
) -> list[Haystack]:
    """Returns one haystack for each length and depth; every one has a key of its own.

    Raises:
        ValueError: the text is too short.
    """
    keys = random.Random(seed)
    words = tokenizer.encode(text[: 8 * max(lengths)])
    if len(words) < max(lengths):
        raise ValueError(f"the text has {len(words)} tokens at its beginning, {max(lengths)} are wanted")
    question = tokenizer.encode(QUESTION, add_special_tokens=False)
    haystacks = []
    for length in lengths:
        for depth in depths:
            key = str(keys.randrange(10_000, 100_000))
            needle = tokenizer.encode(NEEDLE.format(key=key), add_special_tokens=False)
            hay = words[: length - len(needle) - len(question)]
            split = int(depth * len(hay))
            haystacks.append(Haystack(length, depth, key, [*hay[:split], *needle, *hay[split:], *question]))
    return haystacks


def is_found(haystack: Haystack, answer: str) -> bool:
    """Whether the answer begins with the key."""
    return answer.lstrip(" :\n").startswith(haystack.key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, help="UTF-8 text; by default the news of `jaxinfer bench accuracy`")
    parser.add_argument("--kv", nargs="+", default=["float32", "bfloat16", "float8", "int8", "int4", "int2"])
    parser.add_argument("--page-size", type=int, help="by default what suits each precision")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 8000])
    parser.add_argument("--depths", nargs="+", type=float, default=[0.1, 0.5, 0.9])
    args = parser.parse_args()
    model = load(args.model, quantize="none", dtype="float32")
    text = (args.text or find_text()).read_text(encoding="utf-8")
    haystacks = make_haystacks(text, model.tokenizer, args.lengths, args.depths)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    reference: list[list[int]] = []
    print("| K, V | " + " | ".join(f"{n:,} tokens" for n in args.lengths) + f" | same {ANSWER} tokens |", flush=True)
    print("|---" * (2 + len(args.lengths)) + "|")
    for kv in args.kv:
        page_size = args.page_size or KVSpec.parse(kv, "float32").page_size
        llm = LLM(
            model, kv_dtype=kv, page_size=page_size, max_num_seqs=1, max_model_len=max(args.lengths) + ANSWER,
            num_pages=2 + 2 * (max(args.lengths) + ANSWER) // page_size,
        )  # fmt: skip
        outputs = [llm.generate(haystack.prompt, params)[0].outputs[0] for haystack in haystacks]
        answers = [output.token_ids for output in outputs]
        reference = reference or answers
        found = [is_found(haystack, output.text) for haystack, output in zip(haystacks, outputs)]
        cells = [
            f"{sum(hit for hit, h in zip(found, haystacks) if h.length == n)} of {len(args.depths)}"
            for n in args.lengths
        ]
        same = sum(a == b for a, b in zip(answers, reference))
        print(f"| {kv} | {' | '.join(cells)} | {same} of {len(answers)} |", flush=True)


if __name__ == "__main__":
    main()
