"""The command line. Commands import what they need when they run, so that `--help` is instant."""

import sys
import traceback

import click

from jaxinfer import __version__
from jaxinfer.cli.bench import bench
from jaxinfer.cli.chat import chat
from jaxinfer.cli.compile_check import compile_check
from jaxinfer.cli.info import info
from jaxinfer.cli.options import Settings, debug_option
from jaxinfer.cli.output import error
from jaxinfer.cli.plan import plan
from jaxinfer.cli.pull import pull
from jaxinfer.cli.run import run
from jaxinfer.cli.serve import serve

INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="jaxinfer")
@debug_option
def app() -> None:
    """LLM inference in pure-functional JAX."""


for command in (run, chat, serve, pull, info, plan, bench, compile_check):
    app.add_command(debug_option(command))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0, 2 for the user's mistakes, 1 for other failures, 130 after Ctrl-C.

    A reader that goes away (`jaxinfer run ... | head`) ends it quietly with 1: click sees to that.
    """
    settings = Settings()
    try:
        code = app.main(arguments, standalone_mode=False, obj=settings)
    except click.ClickException as mistake:
        mistake.show()
        code = mistake.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as failure:  # the boundary to the user: one line, or the traceback for those who ask
        if settings.debug:
            traceback.print_exc()
        error(str(failure) or type(failure).__name__)
        code = 2 if isinstance(failure, ValueError) else 1
    sys.exit(code if isinstance(code, int) else 0)
