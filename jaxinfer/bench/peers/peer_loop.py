"""What the runners of all engines do: load, say so, then run the requests of each line. Standard library alone.

The task is the program's argument, JSON. Requests come as lines on standard input, answers go as lines to standard
output; whatever the engine prints goes to standard error.
"""

import json
import os
import resource
import sys
import time


def serve(load):
    """Serves until standard input ends.

    Args:
        load: takes the task, {"model": path, "threads": n, "max_num_seqs": n, "max_model_len": n, "total_tokens": n};
            returns facts about the engine and a function that takes requests {"prompt": ids, "max_tokens": n} and
            returns, for each, the `time.perf_counter()` of every token, decoded greedily and past any end of sequence.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    start = time.perf_counter()
    facts, run = load(json.loads(sys.argv[1]))
    say({**facts, "load_s": time.perf_counter() - start})
    for line in sys.stdin:
        arrival = time.perf_counter()
        tokens = run(json.loads(line))
        say({"arrival": arrival, "tokens": tokens, "peak_memory_mib": peak_memory_mib()})


def peak_memory_mib():
    """Returns the most memory that this process has had resident.

    On Linux from /proc: `getrusage` of a child counts what its parent had before `exec`.
    """
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except OSError:
        scale = 2**20 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
