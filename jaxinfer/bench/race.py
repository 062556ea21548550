"""Runs workloads through several engines in turn."""

from collections.abc import Callable, Mapping, Sequence

from jaxinfer.bench.contestants import Contestant, Ours
from jaxinfer.bench.metrics import Trace
from jaxinfer.bench.workloads import BenchRequest, rounds

type Runs = dict[str, list[list[Trace]]]  # by contestant: the traces of each repeat


def race(
    contestants: Sequence[Contestant], name: str, requests: list[BenchRequest], repeats: int,
    progress: Callable[[int, str, Sequence[Trace]], None] | None = None,
) -> Runs:  # fmt: skip
    """Returns what each engine did in each repeat of a workload, after a warm-up that is not counted.

    The engines run in turn within every repeat, so that what disturbs the machine for a while disturbs all of them.

    Args:
        contestants: the engines.
        name: of the workload; W1 and W2 are single streams.
        requests: of the workload.
        repeats: timed runs of each engine.
        progress: called with the number of the repeat, the engine's name and its traces.

    Raises:
        ValueError: repeats is below 1.
        RuntimeError: an engine gave too few or too many tokens, so that its figures could not be compared; or ours
            compiled a step in a timed run.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    runs: Runs = {contestant.name: [] for contestant in contestants}
    for i, one in enumerate(rounds(name, requests, repeats)):
        for contestant in contestants:
            compiled = contestant.num_compiled if isinstance(contestant, Ours) else 0
            traces = contestant.run(one)
            _check_tokens(name, contestant.name, one, traces)
            if i == 0:
                continue
            if isinstance(contestant, Ours) and contestant.num_compiled != compiled:
                raise RuntimeError(
                    f"{name}: {contestant.name} compiled a step in a timed run; its shape did not occur in the warm-up"
                )
            runs[contestant.name].append(traces)
            if progress:
                progress(i, contestant.name, traces)
    return runs


def ratios(ours: Mapping[str, float], peer: Mapping[str, float]) -> dict[str, float]:
    """Returns how many times faster we are in the figures that both have (above 1: faster).

    Raises:
        ValueError: the work was not the same.
    """
    for key in ("requests", "prompt_tokens", "output_tokens"):
        if ours[key] != peer[key]:
            raise ValueError(f"different work cannot be compared: ours has {ours[key]:g} {key}, the peer {peer[key]:g}")
    less_is_better = {"TTFT": "ttft_p50_s", "TPOT": "tpot_p50_s", "total": "total_s"}
    more_is_better = {"prompt tok/s": "prompt_tok_s", "decode tok/s": "decode_tok_s", "output tok/s": "output_tok_s"}
    found = {name: peer[key] / ours[key] for name, key in less_is_better.items() if key in ours and key in peer}
    return found | {name: ours[key] / peer[key] for name, key in more_is_better.items() if key in ours and key in peer}


def _check_tokens(workload: str, engine: str, requests: Sequence[BenchRequest], traces: Sequence[Trace]) -> None:
    for i, (request, trace) in enumerate(zip(requests, traces, strict=True)):
        if len(trace.tokens) != request.max_tokens:
            raise RuntimeError(
                f"{workload}: {engine} gave {len(trace.tokens)} tokens of request {i}, wanted {request.max_tokens}"
            )
