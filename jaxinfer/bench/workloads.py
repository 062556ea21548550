"""Workloads: requests as token ids with the number of tokens to generate, from a file or made up."""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

LATENCY = ("W1", "W2")  # single streams: their requests run one at a time, another one in every repeat
THROUGHPUT = ("W3", "W4", "W6x8", "W6x32")  # all requests at once
BATCHED_DECODE = {"W6x8": 8, "W6x32": 32}  # these take so many requests of "W6"
SEED = 0


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """One request of a workload; decoded greedily, ignoring the end-of-sequence token."""

    prompt: list[int]
    max_tokens: int


type Workloads = dict[str, list[BenchRequest]]


def made_up(vocab_size: int) -> Workloads:
    """Returns workloads of random tokens, the same in every run.

    W1: 128 tokens in, 128 out, alone. W2: 2,048 in, 1 out, alone. W3: 64 requests of lognormal lengths. W4: 32 requests
    that share 1,024 tokens. W6: 8 and 32 requests of 128 in, 128 out.
    """
    draw = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    def length(median: int) -> int:
        return min(max(round(draw.lognormvariate(math.log(median), 0.7)), 8), 8 * median)

    prefix = tokens(1024)
    decode = [BenchRequest(tokens(128), 128) for _ in range(32)]
    return {
        "W1": [BenchRequest(tokens(128), 128) for _ in range(8)],
        "W2": [BenchRequest(tokens(2048), 1) for _ in range(4)],
        "W3": [BenchRequest(tokens(length(110)), length(100)) for _ in range(64)],
        "W4": [BenchRequest(prefix + tokens(32), 32) for _ in range(32)],
    } | {name: decode[:rows] for name, rows in BATCHED_DECODE.items()}


def read_workloads(path: Path, model: str | None = None) -> Workloads:
    """Returns the workloads of a file that are known here.

    Args:
        path: JSON of the form {"models": {model: {"W1": {"requests": [{"prompt": ids, "n_out": n}]}, ...}}}; W2 calls
            its requests "variants", W4 gives a "prefix" and each request's "suffix".
        model: key in "models"; None where there is only one.

    Raises:
        ValueError: the file is not of this form, or does not know the model.
    """
    try:
        tables = json.loads(path.read_text())["models"]
        if model is None and len(tables) == 1:
            [model] = tables
        if model not in tables:
            raise ValueError(f"{path} has no workloads for {model!r}; --workload-model can be {', '.join(tables)}")
        found = {name: _requests(name, table) for name, table in tables[model].items() if name != "W5"}  # W5 is online
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a workload file: {error!r}") from error
    decode = found.pop("W6", [])
    return found | {name: decode[:rows] for name, rows in BATCHED_DECODE.items() if len(decode) >= rows}


def select(workloads: Workloads, names: tuple[str, ...], max_model_len: int) -> Workloads:
    """Returns the named workloads, in the order of the names.

    Raises:
        ValueError: there is no workload of that name, or a request of it is too long for the model.
    """
    for name in names:
        if name not in workloads:
            raise ValueError(f"no workload {name}; there are {', '.join(workloads)}")
        longest = max(len(request.prompt) + request.max_tokens for request in workloads[name])
        if longest > max_model_len:
            raise ValueError(f"{name} needs {longest} tokens, the model takes {max_model_len}; choose others by --only")
    return {name: workloads[name] for name in names}


def rounds(name: str, requests: list[BenchRequest], repeats: int) -> list[list[BenchRequest]]:
    """Returns the requests of the warm-up and of each repeat.

    A single stream takes the last request for the warm-up and then one after the other, so that a repeat finds
    nothing of its prompt in a prefix cache as long as there are more requests than repeats.
    """
    if name not in LATENCY:
        return [requests] * (1 + repeats)
    return [requests[-1:], *([requests[i % len(requests)]] for i in range(repeats))]


def _requests(name: str, table: dict[str, Any]) -> list[BenchRequest]:
    requests = []
    for entry in table["variants" if "variants" in table else "requests"]:
        prompt = table.get("prefix", []) + (entry["suffix"] if "prefix" in table else entry["prompt"])
        if not prompt or not all(type(token) is int for token in prompt) or entry["n_out"] < 1:
            raise ValueError(f"{name}: a request needs a prompt of token ids and n_out of at least 1, got {entry}")
        requests.append(BenchRequest(prompt, entry["n_out"]))
    if not requests:
        raise ValueError(f"{name} has no requests")
    return requests
