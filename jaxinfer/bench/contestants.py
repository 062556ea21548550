"""Who takes part in a comparison: our engine in this process, and others in processes of their own."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from jaxinfer.bench.metrics import Trace
from jaxinfer.bench.workloads import BenchRequest
from jaxinfer.llm import LLM
from jaxinfer.sampling.params import SamplingParams

RUNNERS = Path(__file__).parent / "peers"
PACKAGES = RUNNERS.parents[2]
PEERS = {"llama.cpp": "run_llamacpp.py", "transformers": "run_transformers.py", "vllm": "run_vllm.py"}
STDERR_LINES = 15  # of a peer that has failed


class Contestant(Protocol):
    """An engine with a model, ready to run."""

    name: str

    def run(self, requests: Sequence[BenchRequest]) -> list[Trace]:
        """Submits all requests at once and returns when their tokens arrived."""
        ...


class Ours:
    """Our engine."""

    def __init__(self, name: str, llm: LLM):
        """Takes a name that tells its mode."""
        self.name = name
        self.llm = llm

    def run(self, requests: Sequence[BenchRequest]) -> list[Trace]:
        """Steps the engine until all requests have ended; nothing is cached from the run before.

        A token's time is the moment when the `CompletionChunk` that holds it comes back from `Engine.step`: tokens
        of one dispatch of several decode steps arrive together.
        """
        self.llm.reset_prefix_cache()
        engine, traces = self.llm.engine, {}
        for i, request in enumerate(requests):
            params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
            traces[str(i)] = Trace(time.perf_counter(), len(request.prompt))
            engine.add_request(str(i), request.prompt, params)
        while engine.has_work:
            chunks = engine.step()
            now = time.perf_counter()
            for chunk in chunks:
                traces[chunk.request_id].tokens += [now] * len(chunk.token_ids)
        for i in traces:
            engine.pop_output(i)
        return list(traces.values())

    @property
    def num_compiled(self) -> int:
        """How many steps have been compiled so far."""
        return self.llm.stats().compile.num_compiled


@dataclasses.dataclass(frozen=True)
class Peer:
    """Which other engine, the interpreter of its environment, and the model in a form that it reads."""

    name: str
    python: str
    model: Path


class PeerProcess:
    """A runner in its own process; see `peers/peer_loop.py` for what it is told and answers."""

    def __init__(self, name: str, command: list[str], task: dict[str, Any], stderr: IO[str]):
        """Starts the process and waits until its model is loaded.

        Raises:
            RuntimeError: it did not start; the message ends with what it wrote to standard error.
        """
        self.name = name
        self._stderr = stderr
        packages = [str(PACKAGES), os.environ.get("PYTHONPATH", "")] if command[0] == sys.executable else []
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if packages:  # our own, perhaps from a checkout
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, packages))
        self.started = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(task)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env=environment,
            )  # fmt: skip
        except OSError as error:
            raise RuntimeError(f"{name}: cannot run {command[0]}: {error}; give its interpreter") from error
        try:
            self.facts = self._answer()
        except BaseException:  # Ctrl-C too: a model takes a while to load
            self.close()
            raise

    def run(self, requests: Sequence[BenchRequest]) -> list[Trace]:
        """Has the peer run the requests; all count as having arrived when it was told of them.

        Raises:
            RuntimeError: the peer failed.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps([dataclasses.asdict(request) for request in requests]) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self.facts["peak_memory_mib"] = answer["peak_memory_mib"]
        pairs = zip(requests, answer["tokens"], strict=True)
        return [Trace(answer["arrival"], len(request.prompt), times) for request, times in pairs]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._stderr.seek(0)
        tail = "".join(f"\n  {line.rstrip()}" for line in self._stderr.readlines()[-STDERR_LINES:])
        raise RuntimeError(f"{self.name} failed with code {code}; the end of its standard error:{tail}")


def task_for(model: Path, workloads: Sequence[Sequence[BenchRequest]], max_num_seqs: int, threads: int) -> dict:
    """Returns what a peer is told at its start: how many rows and tokens it must have room for."""
    lengths = [[len(request.prompt) + request.max_tokens for request in requests] for requests in workloads]
    return {
        "model": str(model),
        "threads": threads,
        "max_num_seqs": min(max_num_seqs, max(map(len, lengths))),
        "max_model_len": max(map(max, lengths)),
        "total_tokens": max(map(sum, lengths)),
    }


@contextlib.contextmanager
def open_process(name: str, command: list[str], task: dict[str, Any]) -> Iterator[PeerProcess]:
    """Yields a started peer and ends it afterwards, however that goes."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        process = PeerProcess(name, command, task, stderr)
        try:
            yield process
        finally:
            process.close()
