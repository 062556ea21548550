"""`jaxinfer run`: one prompt, one answer."""

import sys
from typing import Any

import click

from jaxinfer.cli.options import (
    check_sampling,
    collection_deferred,
    find_model,
    make_llm,
    make_sampling_params,
    model_options,
    prepare,
    sampling_options,
)
from jaxinfer.cli.output import notice_cut, write
from jaxinfer.cli.stopwatch import Stopwatch


@click.command()
@click.argument("prompt", required=False)
@model_options
@sampling_options
@click.option("--raw", is_flag=True, help="Complete the prompt as it is, without the chat template.")
@click.option("--system", help="System message of the conversation.")
@click.option("--timings", is_flag=True, help="Show on standard error where the time went.")
def run(
    prompt: str | None, model: str, dtype: str | None, quantize: str | None, activations: str | None,
    kv_dtype: str, max_model_len: int | None, raw: bool, system: str | None, timings: bool, **sampling: Any,
) -> None:  # fmt: skip
    """Answer PROMPT, writing the text to standard output as it comes.

    "-" or no PROMPT reads standard input, of which the final newline is left out.
    """
    text = _read_prompt(prompt)
    watch = Stopwatch()
    with collection_deferred():
        check_sampling(sampling)
        path = find_model(model)
        watch.lap("download")
        import jaxinfer.llm  # noqa: F401  (the import is timed by itself)

        watch.lap("import")
        llm = make_llm(path, dtype, quantize, activations, kv_dtype, max_model_len)
        watch.lap("load")
        params = make_sampling_params(llm.model.default_sampling_params, sampling)
        use_template = llm.tokenizer.chat_template is not None and not raw
        if system is not None and not use_template:
            raise ValueError("--system needs the model's chat template: leave out --raw, or choose an instruct model")
        if use_template:
            if not text.strip():
                raise ValueError("the prompt is empty: say something, or use --raw")
            messages = [{"role": "system", "content": system}] if system is not None else []
            text = llm.tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])
        stream = llm.stream(text, params)  # refuses a bad prompt before anything is compiled
        prepare(llm, text, params)
        programs = llm.stats().compile
        watch.lap("programs", f"{programs.num_compiled} compiled, {programs.num_loaded} from the cache")
    finish_reason = None
    for chunk in stream:
        watch.count(len(chunk.token_ids))
        write(chunk.text)
        finish_reason = chunk.finish_reason
    write("\n")
    watch.lap("other tokens")
    notice_cut(finish_reason, watch.num_tokens, params.max_tokens, sampling["max_tokens"])
    if timings:
        click.echo(watch.report(), err=True)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError('give a PROMPT, as in: jaxinfer run "What is JAX?"')
    return sys.stdin.read().removesuffix("\n") if prompt in (None, "-") else prompt
