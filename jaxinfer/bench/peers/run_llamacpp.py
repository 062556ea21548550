"""llama.cpp through llama-cpp-python's C API, with continuous batching as llama-server has it.

Every batch holds one token of each request that generates, then pieces of prompts, up to 512 tokens. A prefix that all
requests share is computed once and its cells are shared (as in llama.cpp's examples/parallel).
"""

import os
import time

import llama_cpp
import numpy as np
from peer_loop import serve

BATCH = 512  # llama.cpp's default micro-batch
SHARED_AT_LEAST = 64  # tokens of a prefix that is worth a batch of its own


def load(task):
    """Loads the model and makes a context of `total_tokens` cells."""
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(task["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not load {task['model']}")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = task["total_tokens"] + BATCH
    options.n_batch = options.n_ubatch = BATCH
    options.n_seq_max = task["max_num_seqs"] + 1  # one more keeps a shared prefix
    options.n_threads = options.n_threads_batch = task["threads"]
    options.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise SystemExit(f"llama.cpp makes no context of {options.n_ctx} tokens")
    loop = Loop(model, context, task["max_num_seqs"])
    loop.keep = silent
    facts = {"engine": f"llama-cpp-python {llama_cpp.__version__}", "file": os.path.basename(task["model"])}
    return facts, loop.run


class Loop:
    """Continuous batching over one context."""

    def __init__(self, model, context, slots):
        self.context = context
        self.memory = llama_cpp.llama_get_memory(context)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.slots = slots
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(self, requests):
        """Returns the times of all tokens."""
        llama_cpp.llama_memory_clear(self.memory, True)
        times = [[] for _ in requests]
        waiting = list(range(len(requests)))[::-1]
        free = list(range(self.slots))[::-1]
        prompts = [request["prompt"] for request in requests]
        shared = shared_prefix(prompts)
        if shared:
            keeper = self.slots
            for start in range(0, shared, BATCH):
                piece = range(start, min(start + BATCH, shared))
                self.decode([(prompts[0][i], i, keeper, False) for i in piece])
        running = {}  # slot: [request, tokens computed, last token or None]
        while waiting or running:
            while waiting and free:
                slot = free.pop()
                if shared:
                    llama_cpp.llama_memory_seq_cp(self.memory, keeper, slot, 0, shared)
                running[slot] = [waiting.pop(), shared, None]
            rows, owners = [], []
            for slot, (_, done, last) in running.items():
                if last is not None:
                    rows.append((last, done, slot, True))
                    owners.append((slot, len(rows) - 1))
                    running[slot][1] += 1
            for slot, (i, done, last) in running.items():
                if last is None and len(rows) < BATCH:
                    stop = min(len(prompts[i]), done + BATCH - len(rows))
                    rows += [(prompts[i][at], at, slot, at == len(prompts[i]) - 1) for at in range(done, stop)]
                    running[slot][1] = stop
                    if stop == len(prompts[i]):
                        owners.append((slot, len(rows) - 1))
            self.decode(rows)
            for slot, row in owners:
                logits = llama_cpp.llama_get_logits_ith(self.context, row)
                i = running[slot][0]
                running[slot][2] = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
                times[i].append(time.perf_counter())
                if len(times[i]) == requests[i]["max_tokens"]:
                    del running[slot]
                    llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
                    free.append(slot)
        return times

    def decode(self, rows):
        """Computes rows of (token, position, sequence, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for at, (token, position, slot, wanted) in enumerate(rows):
            batch.token[at] = token
            batch.pos[at] = position
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = slot
            batch.logits[at] = wanted
        if code := llama_cpp.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode failed with code {code}")


def shared_prefix(prompts):
    """Returns how many tokens all prompts begin with, the last of each left out; 0 where it is not worth sharing."""
    shortest = min(len(prompt) for prompt in prompts) - 1
    differs = (i for i in range(shortest) if any(prompt[i] != prompts[0][i] for prompt in prompts))
    shared = next(differs, shortest)
    return shared if len(prompts) > 1 and shared >= SHARED_AT_LEAST else 0


if __name__ == "__main__":
    serve(load)
