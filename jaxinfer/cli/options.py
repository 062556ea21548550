"""Options that several commands share, and the model and parameters made of them."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.sampling.params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_TEMPERATURE, DEFAULT_TOP_P = 0.2, 0.9  # where a model's authors recommend nothing
DEFAULT_LENGTH = 4096  # tokens of prompt and answer that `run` and `chat` keep room for

type Command = Callable[..., Any]

_MODEL = (
    click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True,
                 help="A known name, a GGUF file, a model directory, or a hub id."),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
                 help="Precision; by default float32 on CPU, bfloat16 elsewhere."),
    click.option("--max-model-len", type=int,
                 help=f"Tokens of prompt and answer together; by default the model's limit, at most {DEFAULT_LENGTH}."),
)  # fmt: skip

_SAMPLING = (
    click.option("--max-tokens", type=int, help="Most tokens of the answer."),
    click.option("--min-tokens", type=int, help="Fewest tokens of the answer."),
    click.option(
        "--temperature", type=float, help="0 is greedy; by default what the model recommends, else 0.2 with top-p 0.9."
    ),
    click.option("--top-k", type=int, help="Keep the k most probable tokens; 0 keeps all."),
    click.option("--top-p", type=float, help="Keep the most probable tokens of this total mass."),
    click.option("--min-p", type=float, help="Keep tokens at least this fraction as probable as the best."),
    click.option("--typical-p", type=float, help="Keep the tokens nearest to the entropy, of this total mass."),
    click.option("--repetition-penalty", type=float, help="Above 1 discourages repetition."),
    click.option("--presence-penalty", type=float, help="Subtracted once from tokens that have occurred."),
    click.option("--frequency-penalty", type=float, help="Subtracted for every time a token has occurred."),
    click.option("--seed", type=int, help="Makes the answer repeatable."),
    click.option("--stop", multiple=True, help="End where this string appears; may be given several times."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the end-of-sequence token."),
)


def model_options(command: Command) -> Command:
    """Adds the options that choose the model."""
    return _apply(command, _MODEL)


def sampling_options(command: Command) -> Command:
    """Adds the options of `SamplingParams`; they arrive as keyword arguments, None where not given."""
    return _apply(command, _SAMPLING)


def _apply(command: Command, options: tuple) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def make_llm(model: str, dtype: str | None, max_model_len: int | None) -> "LLM":
    """Loads a model for one conversation at a time, with progress on standard error."""
    from jaxinfer.cli.progress import byte_progress
    from jaxinfer.llm import LLM
    from jaxinfer.loading import load

    with byte_progress(f"Downloading {model}") as download, byte_progress("Loading weights") as loading:
        loaded = load(model, dtype=dtype, progress=download, load_progress=loading)
    length = max_model_len or min(loaded.config.max_position_embeddings, DEFAULT_LENGTH)
    return LLM(loaded, max_num_seqs=1, max_model_len=length)


def make_sampling_params(default: "SamplingParams", given: dict[str, Any]) -> "SamplingParams":
    """Returns the model's default parameters, or ours where it recommends none, with the given options put in."""
    from jaxinfer.sampling.params import SamplingParams

    if default == SamplingParams():
        default = SamplingParams(temperature=DEFAULT_TEMPERATURE, top_p=DEFAULT_TOP_P)
    return dataclasses.replace(default, **{name: value for name, value in given.items() if value not in (None, ())})
