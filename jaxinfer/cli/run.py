"""`jaxinfer run`: one prompt, one answer."""

import sys
import time
from typing import Any

import click

from jaxinfer.cli.options import make_llm, make_sampling_params, model_options, sampling_options


@click.command()
@click.argument("prompt", required=False)
@model_options
@sampling_options
@click.option("--raw", is_flag=True, help="Complete the prompt as it is, without the chat template.")
@click.option("--system", help="System message of the conversation.")
@click.option("--timings", is_flag=True, help="Show on standard error where the time went.")
def run(
    prompt: str | None, model: str, dtype: str | None, max_model_len: int | None, raw: bool, system: str | None,
    timings: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Answer PROMPT, writing the text to standard output as it comes; "-" or no PROMPT reads standard input."""
    watch = _Stopwatch()
    if prompt in (None, "-"):
        if prompt is None and sys.stdin.isatty():
            raise click.UsageError('give a PROMPT, as in: jaxinfer run "What is JAX?"')
        prompt = sys.stdin.read()
    assert prompt is not None
    import jaxinfer.llm  # noqa: F401  (the import is timed by itself)

    watch.lap("import")
    llm = make_llm(model, dtype, max_model_len)
    watch.lap("load")
    params = make_sampling_params(llm.model.default_sampling_params, sampling)
    use_template = llm.tokenizer.chat_template is not None and not raw
    if system is not None and not use_template:
        raise ValueError("--system needs the model's chat template: leave out --raw, or choose an instruct model")
    text = prompt
    if use_template:
        messages = [{"role": "system", "content": system}] if system is not None else []
        text = llm.tokenizer.apply_chat_template([*messages, {"role": "user", "content": prompt}])
    stream = llm.stream(text, params)  # refuses a bad prompt before anything is compiled
    from jaxinfer.cli.progress import spinner

    with spinner("Compiling (kept for the next time)"):
        llm.engine.prepare(len(llm.tokenizer.encode(text)))
    watch.lap("compile")
    num_tokens = 0
    for chunk in stream:
        if chunk.token_ids and not num_tokens:
            watch.lap("first token")
        num_tokens += len(chunk.token_ids)
        click.echo(chunk.text, nl=False)
        sys.stdout.flush()
    click.echo()
    watch.lap("other tokens")
    if timings:
        click.echo(watch.report(num_tokens), err=True)


class _Stopwatch:
    def __init__(self):
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = now - self._last
        self._last = now

    def report(self, num_tokens: int) -> str:
        import resource

        lines = [f"{name:14}{seconds:8.3f} s" for name, seconds in self._laps.items()]
        decode = self._laps["other tokens"]
        if num_tokens > 1:
            lines.append(f"{'decode':14}{(num_tokens - 1) / decode:8.1f} tok/s ({num_tokens} tokens)")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return "\n".join([*lines, f"{'peak memory':14}{peak / 2**20:8.0f} MiB"])
