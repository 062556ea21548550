"""`jaxinfer chat`: a conversation in the terminal."""

import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

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
from jaxinfer.cli.output import error, notice, notice_cut, write

if TYPE_CHECKING:
    from jaxinfer.engine.outputs import CompletionChunk
    from jaxinfer.llm import LLM
    from jaxinfer.sampling.params import SamplingParams

CUT_MARK = " …"  # ends an answer that Ctrl-C stopped, where the model reads it again
HELP = """/reset         forget the conversation
/system TEXT   set the system message and start anew
/help          this list
/exit          leave (or Ctrl-D)
Ctrl-C stops an answer; at the prompt, twice in a row leaves."""


@click.command()
@model_options
@sampling_options
@click.option("--system", help="System message.")
def chat(
    model: str, dtype: str | None, quantize: str | None, activations: str | None, kv_dtype: str,
    max_model_len: int | None, system: str | None, **sampling: Any,
) -> None:  # fmt: skip
    """Talk with a model; answers are streamed, and Ctrl-C stops an answer and not the program."""
    check_sampling(sampling)
    with collection_deferred():
        llm = make_llm(find_model(model), dtype, quantize, activations, kv_dtype, max_model_len)
    if llm.tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template: use `jaxinfer run --raw`, or an instruct model")
    conversation = Conversation(llm, make_sampling_params(llm.model.default_sampling_params, sampling), system)
    if sys.stdin.isatty():
        click.echo(f"{model}, /help for help", err=True)
    for line in _lines():
        if line.startswith("/"):
            if not _command(line, conversation):
                return
        elif line:
            _answer(conversation, line, sampling["max_tokens"])


class Conversation:
    """What has been said, and how the next answer is made."""

    def __init__(self, llm: "LLM", params: "SamplingParams", system: str | None):
        """Starts an empty conversation."""
        self.llm = llm
        self.params = params
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Forgets all that was said."""
        self.system = system
        self.turns: list[dict[str, str]] = []

    def answer(self, text: str) -> Generator["CompletionChunk"]:
        """Yields the answer to `text` in pieces; however it ends, what was said of it is remembered.

        The oldest turns are dropped when the conversation leaves no room for an answer.

        Raises:
            ValueError: `text` alone is too long; the conversation is as it was.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        prompt, turns = self._fit(turns)
        said: list[str] = []
        is_whole = False
        with contextlib.closing(self.llm.stream(prompt, self.params)) as stream:
            if dropped := len(self.turns) + 1 - len(turns):
                notice(f"the conversation is too long: its oldest {dropped} messages were dropped")
            prepare(self.llm, prompt, self.params)
            try:
                for chunk in stream:
                    said.append(chunk.text)
                    yield chunk
                is_whole = True
            finally:
                if said:
                    answer = "".join(said) if is_whole else "".join(said) + CUT_MARK
                    self.turns = [*turns, {"role": "assistant", "content": answer}]

    def _fit(self, turns: list[dict[str, str]]) -> tuple[str, list[dict[str, str]]]:
        """Returns the prompt, and the latest turns that leave room for an answer; the last one always stays."""
        tokenizer, room = self.llm.tokenizer, self.llm.engine.max_model_len
        wanted = min(self.params.max_tokens or room, room // 4)
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        while True:
            prompt = tokenizer.apply_chat_template([*system, *turns])
            if len(tokenizer.encode(prompt)) + wanted <= room or len(turns) == 1:
                return prompt, turns
            turns = turns[2:]  # a question and its answer


def _answer(conversation: Conversation, line: str, max_tokens: int | None) -> None:
    num_tokens, finish_reason = 0, None
    try:
        with contextlib.closing(conversation.answer(line)) as chunks:
            for chunk in chunks:
                write(chunk.text)
                num_tokens += len(chunk.token_ids)
                finish_reason = chunk.finish_reason
        write("\n")
        notice_cut(finish_reason, num_tokens, conversation.params.max_tokens, max_tokens)
    except KeyboardInterrupt:
        write("\n")
        notice("stopped")
    except ValueError as mistake:
        error(str(mistake))


def _command(line: str, conversation: Conversation) -> bool:
    """Does what a line that begins with a slash says; returns whether to go on."""
    word, _, rest = line.partition(" ")
    match word:
        case "/exit" | "/quit":
            return False
        case "/reset":
            conversation.reset(conversation.system)
        case "/system" if rest.strip():
            conversation.reset(rest.strip())
        case "/system":
            error("/system needs a TEXT, such as: /system Answer in French.")
        case "/help":
            click.echo(HELP, err=True)
        case _:
            error(f"unknown command {line!r}\n{HELP}")
    return True


def _lines() -> Iterator[str]:
    """Yields the user's lines; Ctrl-D ends them, and so does Ctrl-C twice in a row."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its history and editing)
    # Only where a person sees it: in a file of answers it would be a part of them.
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    interrupted = False
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                click.echo(err=True)  # the shell's own prompt goes on a new line
            return
        except KeyboardInterrupt:
            click.echo(err=True)
            if interrupted:
                return
            notice("Ctrl-C again to leave")
            interrupted = True
            continue
        interrupted = False
        yield line
