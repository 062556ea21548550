"""What goes where: the model's text to standard output, everything else to standard error."""

import sys

import click


def write(text: str) -> None:
    """Writes a piece of the model's text as it is; `click.echo` would take escape sequences out of it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def notice(text: str) -> None:
    """Tells the user something that went as it should."""
    click.secho(f"({text})", fg="yellow", err=True)


def error(text: str) -> None:
    """Tells the user what went wrong."""
    click.secho(f"error: {text}", fg="red", err=True)


def progress_line(what: str, done: int, total: int) -> None:
    """Shows how far something has come, on one line of standard error where a person is likely to watch."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{what}: {done}/{total}", err=True, nl=done == total)


def notice_cut(finish_reason: str | None, num_tokens: int, max_tokens: int | None, asked: int | None) -> None:
    """Says so when an answer ended for lack of room, unless just that length was asked for.

    Args:
        finish_reason: of the answer.
        num_tokens: its length.
        max_tokens: the limit in force, `asked` or a default.
        asked: the user's own --max-tokens.
    """
    if finish_reason == "length" and num_tokens != asked:
        option = "--max-tokens" if num_tokens == max_tokens else "--max-model-len"
        notice(f"cut off after {num_tokens} tokens by {option}")
