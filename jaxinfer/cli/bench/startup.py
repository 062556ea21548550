"""`jaxinfer bench startup`: from the start of a process to its first token."""

import json
import statistics
import sys
import time
from typing import Any

import click

from jaxinfer.cli.bench.options import Contest, bench_options, open_peer
from jaxinfer.cli.options import find_model


@click.command()
@bench_options
def startup(contest: Contest) -> None:
    """Measure new processes: seconds to the first token of W1's prompt, and the most memory they take for W1.

    Everything is on the disk already, compiled steps too: the run that is not timed has put them there.
    """
    from jaxinfer.bench.contestants import open_process, task_for
    from jaxinfer.bench.report import STARTUP_COLUMNS, table
    from jaxinfer.bench.workloads import BenchRequest

    modes = contest.parsed_modes()
    path = find_model(contest.model)
    [request] = contest.workloads(path, ("W1",))["W1"][:1]
    first = BenchRequest(request.prompt, 1)
    peers = contest.peers(path)
    command = [sys.executable, "-m", "jaxinfer.bench.start"]
    task = task_for(path, [[request]], 1, contest.threads)
    starts: dict[str, Any] = {
        name: lambda name=name, mode=mode: open_process(name, command, task | {"mode": mode})
        for name, mode in modes.items()
    }
    for peer in peers:
        starts[peer.name] = lambda peer=peer: open_peer(peer, task | {"model": str(peer.model)})
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in starts}
    for i in range(contest.repeats + 1):
        for name, start in starts.items():
            with start() as process:
                loaded = time.perf_counter() - process.started
                [trace] = process.run([first])
                figures = {"first_token_s": trace.tokens[0] - process.started, "loaded_s": loaded}
                process.run([request])
                figures["peak_memory_mib"] = process.facts["peak_memory_mib"]
            if i:
                seen[name].append(figures)
                click.echo(f"{i}/{contest.repeats} {name}: {figures['first_token_s']:.2f} s", err=True)
    medians = {n: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for n, runs in seen.items()}
    click.echo(f"\n{table(medians, STARTUP_COLUMNS, 2)}")
    if contest.out:
        contest.out.write_text(json.dumps({"model": contest.model, "startup": medians, "runs": seen}, indent=1))
