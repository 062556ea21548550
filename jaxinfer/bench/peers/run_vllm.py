"""vLLM's engine in the dtype of the model's own config. Its worker's memory is not in the peak memory."""

import os
import time

from peer_loop import serve


def load(task):
    """Starts the engine, on CPU with as many threads as the task says."""
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{task['threads'] - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("OMP_NUM_THREADS", str(task["threads"]))
    import vllm

    llm = vllm.LLM(
        task["model"], skip_tokenizer_init=True, max_model_len=task["max_model_len"],
        max_num_seqs=task["max_num_seqs"],
    )  # fmt: skip
    engine = llm.llm_engine

    def run(requests):
        llm.reset_prefix_cache()  # a repeat must not find what the last one left
        for i, request in enumerate(requests):
            params = vllm.SamplingParams(
                temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
            )
            engine.add_request(str(i), {"prompt_token_ids": request["prompt"]}, params)
        times = [[] for _ in requests]
        while engine.has_unfinished_requests():
            for output in engine.step():
                seen = times[int(output.request_id)]
                seen += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(seen))
        return times

    dtype = str(engine.model_config.dtype).removeprefix("torch.")
    return {"engine": f"vllm {vllm.__version__} {dtype}", "file": os.path.basename(task["model"])}, run


if __name__ == "__main__":
    serve(load)
