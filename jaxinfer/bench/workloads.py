"""Workload files: requests as token ids with the number of tokens to generate."""

import dataclasses
import json
from pathlib import Path

OFFLINE = ("W1", "W2", "W3", "W4", "W6")


@dataclasses.dataclass(frozen=True)
class BenchRequest:
    """One request of a workload; decoded greedily, ignoring the end-of-sequence token."""

    prompt: list[int]
    max_tokens: int


def read_workloads(path: Path, model: str, limit: int | None = None) -> dict[str, list[BenchRequest]]:
    """Returns the offline workloads of a file.

    W1 is one stream, W2 long prompts, W3 many requests, W4 a shared prefix, W6 batched decoding.

    Args:
        path: JSON of the form {"models": {model: {"W1": {"requests": [{"prompt": ids, "n_out": n}]}, ...}}}; W2 calls
            its requests "variants", W4 gives a "prefix" and each request's "suffix".
        model: key in "models".
        limit: takes only so many requests of each.

    Raises:
        ValueError: the file is not of this form, or does not know the model.
    """
    try:
        tables = json.loads(path.read_text())["models"]
        if model not in tables:
            raise ValueError(f"{path} has no workloads for {model!r}; it has {', '.join(tables)}")
        return {
            name: [
                BenchRequest(table.get("prefix", []) + entry.get("prompt", entry.get("suffix")), entry["n_out"])
                for entry in table.get("requests") or table["variants"]
            ][:limit]
            for name, table in tables[model].items()
            if name in OFFLINE
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a workload file: {error!r}") from error
