"""`jaxinfer bench latency` and `throughput`: workloads through our engine and others, in turn."""

import contextlib
import dataclasses
import json
import statistics
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.bench.workloads import LATENCY, THROUGHPUT
from jaxinfer.cli.bench.options import Contest, bench_options, open_peer
from jaxinfer.cli.options import find_model

if TYPE_CHECKING:
    from jaxinfer.bench.contestants import Ours
    from jaxinfer.bench.race import Runs
    from jaxinfer.bench.roofline import Roofline


@click.command()
@bench_options
@click.option("--only", multiple=True, default=LATENCY, show_default=True, type=click.Choice(LATENCY),
              help="W1: 128 tokens in, 128 out. W2: 2,048 in, 1 out.")  # fmt: skip
def latency(contest: Contest, only: tuple[str, ...]) -> None:
    """Measure one stream: time to first token, time per token, speed of prefill and decode."""
    _compare(contest, only)


@click.command()
@bench_options
@click.option(
    "--only",
    multiple=True,
    default=THROUGHPUT,
    show_default=True,
    type=click.Choice(THROUGHPUT),
    help="W3: 64 requests of many lengths. W4: 32 that share 1,024 tokens. W6: 8 or 32 rows of 128 in and out.",
)
def throughput(contest: Contest, only: tuple[str, ...]) -> None:
    """Measure many requests at once: total time, tokens per second, latencies under load."""
    _compare(contest, only)


def _compare(contest: Contest, only: tuple[str, ...]) -> None:
    from jaxinfer.bench.contestants import Ours, task_for
    from jaxinfer.bench.metrics import over_runs
    from jaxinfer.bench.modes import make_llm
    from jaxinfer.bench.race import race, ratios
    from jaxinfer.bench.report import PHASE_COLUMNS, RATIO_COLUMNS, table
    from jaxinfer.bench.roofline import measure_roofline
    from jaxinfer.config import EngineConfig

    modes = contest.parsed_modes()
    path = find_model(contest.model)
    peers, workloads = contest.peers(path), contest.workloads(path, only)
    max_num_seqs = next(iter(modes.values())).get("max_num_seqs", EngineConfig().max_num_seqs)
    before = measure_roofline()
    with contextlib.ExitStack() as stack:
        running = []
        for peer in peers:
            click.echo(f"starting {peer.name}", err=True)
            task = task_for(peer.model, list(workloads.values()), max_num_seqs, contest.threads)
            running.append(stack.enter_context(open_peer(peer, task)))
        ours = [Ours(name, make_llm(path, options)) for name, options in modes.items()]
        runs = {
            name: race([*ours, *running], name, requests, contest.repeats, _Progress(name, contest.repeats))
            for name, requests in workloads.items()
        }
        engines = {process.name: process.facts for process in running}
    roofline = before.best(measure_roofline())  # what disturbs the machine for a while does not lower its limits
    results = {name: {who: over_runs(each) for who, each in run.items()} for name, run in runs.items()}
    compared, reached = {}, {}
    for name, figures in results.items():
        click.echo(f"\n{name}, medians of {contest.repeats} runs\n\n{table(figures)}")
        for one in ours:
            for peer in running:
                compared[f"{name}: {one.name} over {peer.name}"] = ratios(figures[one.name], figures[peer.name])
            reached |= _reached(name, one, runs[name], roofline)
    if compared:
        click.echo(f"\nTimes faster (above 1: ours)\n\n{table(compared, RATIO_COLUMNS, 2)}")
    click.echo(
        f"\nroofline: {roofline.byte_s / 1e9:.1f} GB/s read, {roofline.flop_s / 1e9:,.0f} GFLOP/s multiplied, measured"
        f" here\n\n{table(reached, PHASE_COLUMNS)}"
    )
    for name, facts in engines.items():
        click.echo(f"\n{name}: {', '.join(f'{key} {_short(value)}' for key, value in facts.items())}")
    if contest.out:
        raw = {name: {who: [_as_data(run) for run in each] for who, each in one.items()} for name, one in runs.items()}
        document = {
            "model": contest.model, "peers": engines, "results": results, "ratios": compared, "phases": reached,
            "roofline": dataclasses.asdict(roofline), "runs": raw,
        }  # fmt: skip
        contest.out.write_text(json.dumps(document, indent=1))


class _Progress:
    """Says on standard error what each run took."""

    def __init__(self, workload: str, repeats: int):
        self.workload = workload
        self.repeats = repeats

    def __call__(self, repeat: int, engine: str, traces: Any) -> None:
        from jaxinfer.bench.metrics import summarize

        seconds = summarize(traces)["total_s"]
        click.echo(f"{self.workload} {repeat}/{self.repeats} {engine}: {seconds:.3f} s", err=True)


def _reached(name: str, ours: "Ours", runs: "Runs", roofline: "Roofline") -> dict[str, dict[str, float]]:
    """Returns the figures of each phase, medians over the runs."""
    from jaxinfer.bench.phases import phases

    each = [phases(ours.llm.engine, traces) for traces in runs[ours.name]]
    result = {}
    for phase in each[0]:
        figures = [one[phase].figures(roofline) for one in each]
        result[f"{name} {phase}: {ours.name}"] = {key: statistics.median(f[key] for f in figures) for key in figures[0]}
    return result


def _as_data(traces: Any) -> list[dict[str, Any]]:
    return [dataclasses.asdict(trace) for trace in traces]


def _short(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
