"""transformers' `generate` in float32, one request after the other."""

import os
import time

import torch
import transformers
from peer_loop import serve


class Arrivals(transformers.generation.streamers.BaseStreamer):
    """Notes when tokens come out of `generate`; what comes first is the prompt."""

    def __init__(self):
        self.times = []
        self.is_prompt = True

    def put(self, value):
        """Takes the prompt, then one token a call."""
        if not self.is_prompt:
            self.times.append(time.perf_counter())
        self.is_prompt = False

    def end(self):
        """Called after the last token."""


def load(task):
    """Loads a GGUF file or a Hugging Face directory."""
    torch.set_num_threads(task["threads"])
    folder, file = task["model"], None
    if os.path.isfile(folder):
        folder, file = os.path.split(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)

    def run(requests):
        return [generate(model, **request) for request in requests]

    facts = {"engine": f"transformers {transformers.__version__} float32", "file": os.path.basename(task["model"])}
    return facts, run


def generate(model, prompt, max_tokens):
    """Returns the times of the tokens of one request."""
    arrivals, ids = Arrivals(), torch.tensor([prompt])
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=arrivals, min_new_tokens=max_tokens,
        max_new_tokens=max_tokens,
    )  # fmt: skip
    return arrivals.times


if __name__ == "__main__":
    serve(load)
