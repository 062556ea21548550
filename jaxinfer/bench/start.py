"""Our own runner for `bench startup`: what `jaxinfer run` does from the start of its process to the tokens."""

import time
from typing import Any

from jaxinfer.bench.peers.peer_loop import serve


def load(task: dict[str, Any]) -> Any:
    """Loads the model in the task's "mode" for one request at a time and compiles what the prompt needs."""
    from jaxinfer import SamplingParams
    from jaxinfer.bench.modes import make_llm

    limits = {"max_num_seqs": 1, "max_model_len": task["max_model_len"]}
    llm = make_llm(task["model"], limits | task["mode"])

    def run(requests: list[dict[str, Any]]) -> list[list[float]]:
        return [_generate(**request) for request in requests]

    def _generate(prompt: list[int], max_tokens: int) -> list[float]:
        times: list[float] = []
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.engine.prepare(len(prompt), params)
        for chunk in llm.stream(prompt, params):
            times += [time.perf_counter()] * len(chunk.token_ids)
        return times

    return {"engine": "jaxinfer"}, run


if __name__ == "__main__":
    serve(load)
