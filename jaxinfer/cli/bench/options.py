"""Options of `bench latency`, `throughput` and `startup`, and the engines made of them."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.options import DEFAULT_MODEL

if TYPE_CHECKING:
    from jaxinfer.bench.contestants import Peer
    from jaxinfer.bench.workloads import Workloads

PEER_NAMES = ("llama.cpp", "transformers", "vllm")

_OPTIONS = (
    click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True, help="What `run` takes."),
    click.option("--mode", "modes", multiple=True, default=("",), metavar="NAME=VALUE,...",
                 help="How to load and run it: options of `load` and fields of EngineConfig. Several are compared."),
    click.option("--peer", "peers", multiple=True, type=click.Choice(PEER_NAMES), help="Another engine, run in turn."),
    click.option("--peer-python", multiple=True, help="Interpreter of the peer's environment, one for each --peer."),
    click.option("--peer-model", multiple=True, type=click.Path(exists=True, path_type=Path),
                 help="The model in the peer's format, one for each --peer; by default the same file."),
    click.option("--threads", default=os.cpu_count() or 1, show_default=True, help="Threads of the peers."),
    click.option("--repeats", default=3, show_default=True, help="Timed runs of each, after one that is not timed."),
    click.option("--workloads", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                 help="JSON file of workloads; by default random tokens."),
    click.option("--workload-model", help="Which model's workloads to take from the file."),
    click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures here."),
)  # fmt: skip


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options, which arrive as one `Contest`."""

    @functools.wraps(command)
    def with_contest(
        model: str, modes: tuple[str, ...], peers: tuple[str, ...], peer_python: tuple[str, ...],
        peer_model: tuple[Path, ...], threads: int, repeats: int, file: Path | None, workload_model: str | None,
        out: Path | None, **others: Any,
    ) -> None:  # fmt: skip
        contest = Contest(model, modes, peers, peer_python, peer_model, threads, repeats, file, workload_model, out)
        command(contest, **others)

    result: Callable[..., Any] = with_contest
    for option in reversed(_OPTIONS):
        result = option(result)
    return result


@dataclasses.dataclass(frozen=True)
class Contest:
    """What the options say."""

    model: str
    modes: tuple[str, ...]
    peer_names: tuple[str, ...]
    peer_python: tuple[str, ...]
    peer_model: tuple[Path, ...]
    threads: int
    repeats: int
    file: Path | None
    workload_model: str | None
    out: Path | None

    def parsed_modes(self) -> dict[str, dict[str, Any]]:
        """Returns the options of each mode by a name for it.

        Raises:
            ValueError: a mode is not one.
        """
        from jaxinfer.bench.modes import parse_mode

        return {f"jaxinfer {mode}".strip(): parse_mode(mode) for mode in self.modes}

    def peers(self, path: Path) -> list["Peer"]:
        """Returns the peers, given where our model lies.

        Raises:
            click.UsageError: there are not as many interpreters or models as peers.
        """
        from jaxinfer.bench.contestants import Peer

        count = len(self.peer_names)
        for option, values in (("--peer-python", self.peer_python), ("--peer-model", self.peer_model)):
            if values and len(values) != count:
                raise click.UsageError(f"{option} is given {len(values)} times for {count} --peer")
        pythons = self.peer_python or (sys.executable,) * count
        models = self.peer_model or (path,) * count
        return [Peer(*each) for each in zip(self.peer_names, pythons, models)]

    def workloads(self, path: Path, names: tuple[str, ...]) -> "Workloads":
        """Returns the named workloads, from the file or made up for the model.

        Raises:
            ValueError: one is not there, or is too long for the model.
        """
        from jaxinfer.bench.workloads import made_up, read_workloads, select
        from jaxinfer.description import describe

        config = describe(path).config
        every = read_workloads(self.file, self.workload_model) if self.file else made_up(config.vocab_size)
        return select(every, names, config.max_position_embeddings)


@contextlib.contextmanager
def open_peer(peer: "Peer", task: dict[str, Any]) -> Iterator[Any]:
    """Yields the running peer."""
    from jaxinfer.bench.contestants import PEERS, RUNNERS, open_process

    with open_process(peer.name, [peer.python, str(RUNNERS / PEERS[peer.name])], task) as process:
        yield process
