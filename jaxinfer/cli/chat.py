"""`jaxinfer chat`: a conversation in the terminal."""

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.options import make_llm, make_sampling_params, model_options, sampling_options

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.sampling.params import SamplingParams

HELP = """/reset         forget the conversation
/system TEXT   set the system message and start anew
/help          this list
/exit          leave (or Ctrl-D)
Ctrl-C stops an answer; at the prompt, twice in a row leaves."""


@click.command()
@model_options
@sampling_options
@click.option("--system", help="System message.")
def chat(model: str, dtype: str | None, max_model_len: int | None, system: str | None, **sampling: Any) -> None:
    """Talk with a model; answers are streamed, and Ctrl-C stops an answer and not the program."""
    llm = make_llm(model, dtype, max_model_len)
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
            _answer(conversation, line)


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

    def answer(self, text: str) -> Iterator[str]:
        """Yields the answer to `text` in pieces; however it ends, what was said of it is remembered.

        The oldest turns are dropped when the conversation leaves no room for an answer.

        Raises:
            ValueError: `text` alone is too long.
        """
        self.turns.append({"role": "user", "content": text})
        said: list[str] = []
        try:
            with contextlib.closing(self.llm.stream(self._fitting_prompt(), self.params)) as stream:
                for chunk in stream:
                    said.append(chunk.text)
                    yield chunk.text
        finally:
            if said:
                self.turns.append({"role": "assistant", "content": "".join(said)})
            else:
                self.turns.pop()

    def _fitting_prompt(self) -> str:
        tokenizer, room = self.llm.tokenizer, self.llm.engine.max_model_len
        wanted = min(self.params.max_tokens or room, room // 4)
        while True:
            messages = [{"role": "system", "content": self.system}] if self.system is not None else []
            prompt = tokenizer.apply_chat_template(messages + self.turns)
            if len(tokenizer.encode(prompt)) + wanted <= room or len(self.turns) == 1:
                return prompt
            del self.turns[: 2 if len(self.turns) > 2 else 1]
            click.secho("(the oldest turn was dropped: the conversation is too long)", fg="yellow", err=True)


def _answer(conversation: Conversation, line: str) -> None:
    try:
        for text in conversation.answer(line):
            click.echo(text, nl=False)
            sys.stdout.flush()
        click.echo()
    except KeyboardInterrupt:
        click.echo()
        click.secho("(stopped)", fg="yellow", err=True)
    except ValueError as error:
        click.secho(f"error: {error}", fg="red", err=True)


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
        case "/help":
            click.echo(HELP, err=True)
        case _:
            click.secho(f"error: unknown command {line!r}\n{HELP}", fg="red", err=True)
    return True


def _lines() -> Iterator[str]:
    """Yields the user's lines; Ctrl-D ends them, and so does Ctrl-C twice in a row."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives `input` its history and editing)
    prompt = "> " if sys.stdin.isatty() else ""
    interrupted = False
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo()
            if interrupted:
                return
            click.secho("(Ctrl-C again to leave)", fg="yellow", err=True)
            interrupted = True
            continue
        interrupted = False
        yield line
