"""Options that several commands share, and the model and parameters made of them."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from jaxinfer.llm import LLM
    from jaxinfer.sampling.params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_TEMPERATURE = 0.0  # greedy, where a model's authors recommend nothing
DEFAULT_LENGTH = 4096  # tokens of prompt and answer that `run` and `chat` keep room for

type Command = Callable[..., Any]


@dataclasses.dataclass
class Settings:
    """What holds for every command."""

    debug: bool = False


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Settings).debug = True


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show the traceback of an error."
)

_WEIGHTS = (
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
                 help="Precision; by default float32 on CPU, bfloat16 elsewhere."),
    click.option("--quantize", type=click.Choice(["none", "int8", "int4"]),
                 help="Pack the weights in 8 or 4 bits; by default as the file has them, expanded with none."),
    click.option("--activations", type=click.Choice(["float32", "int16", "int8"]),
                 help="What packed weights are multiplied with; by default floats as they are. "
                      "int16 and int8 round them: faster, less exact."),
    click.option("--kv", "kv_dtype", default="auto", show_default=True,
                 help="Precision of keys and values, such as int8, float8, bfloat16; or of each, as int8,bfloat16."),
)  # fmt: skip

_MODEL = (
    click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True,
                 help="A known name, a GGUF file, a model directory, or a hub id."),
    *_WEIGHTS,
    click.option("--max-model-len", type=int,
                 help=f"Tokens of prompt and answer together; by default the model's limit, at most {DEFAULT_LENGTH}."),
)  # fmt: skip

_SAMPLING = (
    click.option("--max-tokens", type=int, help="Most tokens of the answer."),
    click.option("--min-tokens", type=int, help="Fewest tokens of the answer."),
    click.option("--temperature", type=float, help="0 is greedy; by default what the model recommends, else 0."),
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


def weight_options(command: Command) -> Command:
    """Adds the options that choose the precision of the model."""
    return _apply(command, _WEIGHTS)


def sampling_options(command: Command) -> Command:
    """Adds the options of `SamplingParams`; they arrive as keyword arguments, None where not given."""
    return _apply(command, _SAMPLING)


def _apply(command: Command, options: tuple) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


@contextlib.contextmanager
def collection_deferred() -> Iterator[None]:
    """Leaves out garbage collection while a program starts: nearly all that is made then stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def find_model(model: str) -> Path:
    """Returns where a model lies, after downloading it when needed; imports no jax, so a wrong name fails at once."""
    from checkpoints.hub import resolve
    from jaxinfer.cli.progress import byte_progress

    with byte_progress(f"Downloading {model}") as progress:
        return resolve(model, progress=progress)


def make_llm(
    path: Path, dtype: str | None, quantize: str | None, activations: str | None, kv_dtype: str,
    max_model_len: int | None,
) -> "LLM":  # fmt: skip
    """Loads a model for one conversation at a time, with progress on standard error."""
    from jaxinfer.cli.progress import byte_progress
    from jaxinfer.kv_spec import KVSpec
    from jaxinfer.llm import LLM
    from jaxinfer.loading import load

    with byte_progress("Loading weights") as progress:
        loaded = load(path, dtype=dtype, quantize=quantize, activations=activations, load_progress=progress)
    if max_model_len is None:
        max_model_len = min(loaded.config.max_position_embeddings, DEFAULT_LENGTH)
    page_size = KVSpec.parse(kv_dtype, "float32").page_size
    return LLM(loaded, max_num_seqs=1, max_model_len=max_model_len, kv_dtype=kv_dtype, page_size=page_size)


def prepare(llm: "LLM", prompt: str, params: "SamplingParams") -> None:
    """Compiles what this prompt needs, unless it has been, saying so when it takes long."""
    from jaxinfer.cli.progress import spinner

    with spinner("Compiling (kept for the next time)"):
        llm.engine.prepare(len(llm.tokenizer.encode(prompt)), params)


def check_sampling(given: dict[str, Any]) -> None:
    """Refuses bad sampling options before anything slow happens.

    Raises:
        ValueError: see `SamplingParams`.
    """
    from jaxinfer.sampling.params import SamplingParams

    make_sampling_params(SamplingParams(), given)


def make_sampling_params(default: "SamplingParams", given: dict[str, Any]) -> "SamplingParams":
    """Returns the model's default parameters, or ours where it recommends none, with the given options put in."""
    from jaxinfer.sampling.params import SamplingParams

    if default == SamplingParams():
        default = SamplingParams(temperature=DEFAULT_TEMPERATURE)
    return dataclasses.replace(default, **{name: value for name, value in given.items() if value not in (None, ())})
