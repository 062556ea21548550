"""The command line. Commands import what they need when they run, so that `--help` is instant."""

import os
import sys
import traceback

import click

from jaxinfer import __version__
from jaxinfer.cli.chat import chat
from jaxinfer.cli.info import info
from jaxinfer.cli.pull import pull
from jaxinfer.cli.run import run

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="jaxinfer")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def app(debug: bool) -> None:
    """LLM inference in pure-functional JAX."""
    click.get_current_context().obj = debug


for command in (run, chat, pull, info):
    app.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0, 2 for the user's mistakes, 1 for other failures, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app.main(arguments, standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:  # `jaxinfer run ... | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:  # the boundary to the user: one line, or the traceback for those who ask
        if "--debug" in arguments:
            traceback.print_exc()
        click.secho(f"error: {error}", fg="red", err=True)
        code = 2 if isinstance(error, ValueError) else 1
    sys.exit(code if isinstance(code, int) else 0)
