"""A peer of the standard library alone: a token every millisecond, or what the model's name asks for."""

import sys
import time

from peer_loop import serve


def load(task):
    print("a word on standard output disturbs nobody")
    if "broken" in task["model"]:
        sys.exit("no such file\nthe model is broken")

    def run(requests):
        start, missing = time.perf_counter(), "short" in task["model"]
        return [[start + i / 1000 for i in range(1, request["max_tokens"] + 1 - missing)] for request in requests]

    return {"engine": "fake 1.0", "rows": task["max_num_seqs"]}, run


serve(load)
