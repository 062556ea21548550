"""`load`: a model's name or path to its configuration, parameters and tokenizer."""

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from checkpoints import orbax_io
from checkpoints.gguf_io import GGUFFile
from checkpoints.hub import resolve
from checkpoints.load import Target, load_tree
from checkpoints.safetensors_io import SafetensorsSource
from checkpoints.sources import TensorSource
from checkpoints.trees import flatten
from jaxinfer.config import ModelConfig, RopeScaling
from jaxinfer.grammar import GrammarCompiler
from jaxinfer.model.families import config_from_gguf, config_from_hf
from jaxinfer.model.params import Params, abstract_params
from jaxinfer.model.spec import DecoderSpec
from jaxinfer.model.weight_names import IGNORED, gguf_name, gguf_transform, hf_name, parameter_paths
from jaxinfer.quantization import is_packed
from jaxinfer.quantization.activations import check_activations, chosen_activations
from jaxinfer.quantization.packing import QUANTIZE, pack_params, packed_plan
from jaxinfer.sampling.params import SamplingParams
from jaxinfer.tokenizer import Tokenizer
from sharding import AxisRules, tree_shardings

if TYPE_CHECKING:
    from jaxinfer.model.decoder import Decoder

Progress = Callable[[int, int], None]  # bytes done, bytes in all
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model in memory.

    Attributes:
        spec: what its decoder is made of.
        params: nested dict of arrays.
        tokenizer: text to ids and back, and the chat template.
        default_sampling_params: what the model's authors recommend (generation_config.json), or ours.
    """

    spec: DecoderSpec
    params: Params
    tokenizer: Tokenizer
    default_sampling_params: SamplingParams

    @property
    def config(self) -> ModelConfig:
        """Shape and options."""
        return self.spec.config

    @functools.cached_property
    def decoder(self) -> "Decoder":
        """The linen module, made when first used; `decoder.apply({"params": params}, cache, batch)`."""
        return self.spec.build()

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        """What makes the grammars of structured outputs, when first used."""
        return GrammarCompiler(self.tokenizer, self.config.vocab_size)

    def save(self, path: str | Path) -> None:
        """Writes the model as an Orbax directory that `load` reads back; needs `jaxinfer[orbax]`.

        Raises:
            ValueError: the path exists, Orbax is not installed, or the weights are packed.
        """
        if _has_packed(self.params):
            raise ValueError('packed weights cannot be saved: load the model with quantize="none" and save that')
        sampling = self.default_sampling_params
        config = {
            "model": dataclasses.asdict(self.config),
            "sampling": {name: getattr(sampling, name) for name in SAMPLING_DEFAULTS},
            "dtype": jnp.dtype(self.spec.dtype).name,
        }
        with tempfile.TemporaryDirectory() as folder:
            files = self.tokenizer.save(folder)
            orbax_io.save(path, self.params, config, files)


SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


def load(
    model: str | Path,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    activations: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: AxisRules | None = None,
    progress: Progress | None = None,
    load_progress: Progress | None = None,
) -> Model:
    """Returns a model, its weights read tensor by tensor straight onto their devices.

    Args:
        model: a known name ("smollm2-135m"), the path of a GGUF file, a Hugging Face directory or a directory
            made by `Model.save`, or a hub id. Known names and hub ids are downloaded when they are not cached.
        dtype: "float32", "bfloat16" or "float16" for activations, KV cache and the weights that are not packed; None
            takes float32 on CPU, where half precision gains nothing, and bfloat16 elsewhere.
        quantize: "int8" or "int4" packs every matrix of a model in 8 or 4 bits, rounded to nearest; "none" expands
            packed ones to `dtype`. None keeps what a GGUF file has packed as it is, on one device; over a mesh and
            from other files it is "none".
        activations: what packed weights are multiplied with. None and "float32": the activations as they are, in
            `dtype`. "int16", for the C++ kernels of CPUs: rounded to 16 bits, one scale for 32 inputs, an error of
            2**-16 of the largest of them. "int8": rounded to 8 bits, as llama.cpp does. Both are faster and move the
            logits, int8 some 200 times as much; a near tie may go the other way, and that may depend on how requests
            are batched.
        mesh: shards the weights over its devices by `rules`; None puts them on the default device.
        rules: logical axes to mesh axes; None takes the defaults of `AxisRules`.
        progress: called with bytes done and in all during a download.
        load_progress: the same while the weights are read.

    Raises:
        ValueError: the model is unknown, damaged, of an unsupported architecture or has unsupported options, or the
            arguments do not go together.
    """
    path = resolve(str(model), progress=progress)
    options = _Options(_dtype(dtype), quantize, activations, mesh, rules or AxisRules(), load_progress)
    if path.is_file() and path.suffix == ".safetensors":
        raise ValueError(f"{path} is a weight file alone; give the directory with its config.json and tokenizer.json")
    read = _load_gguf if path.is_file() else _load_orbax if orbax_io.is_checkpoint(path) else _load_hf
    return read(path, options)


def _has_packed(params: Params) -> bool:
    return any(is_packed(leaf) for leaf in jax.tree.leaves(params, is_leaf=is_packed))


@dataclasses.dataclass(frozen=True)
class _Options:
    """What `load` was asked for, apart from the model."""

    dtype: Any
    quantize: str | None
    activations: str | None
    mesh: jax.sharding.Mesh | None
    rules: AxisRules
    progress: Progress | None

    def __post_init__(self) -> None:
        if self.quantize not in (*QUANTIZE, None):
            raise ValueError(f"quantize must be one of {', '.join(QUANTIZE)} or None, got {self.quantize!r}")
        check_activations(self.activations)
        if self.mesh is not None and self.quantize in ("int8", "int4"):
            raise ValueError(f"quantize={self.quantize!r} packs weights for one device so far: leave out the mesh")

    def leaves(self, config: ModelConfig) -> tuple[Params, Any]:
        """Returns the abstract parameters and their shardings."""
        abstract, axes = abstract_params(config, self.dtype)
        return abstract, None if self.mesh is None else tree_shardings(abstract, axes, self.mesh, self.rules)

    def packed(self, plan: Mapping[str, Target], source: TensorSource, abstract: Params) -> Mapping[str, Target]:
        """Returns the plan with the matrices packed that are to be."""
        if self.quantize == "none" or self.mesh is not None:
            return plan
        return packed_plan(plan, source, flatten(abstract), self.quantize)

    def spec(self, config: ModelConfig, params: Params) -> DecoderSpec:
        """Returns the decoder for the parameters."""
        return DecoderSpec(config, self.dtype, activations=chosen_activations(self.activations, params))


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Returns the configuration of an open GGUF file."""
    names = frozenset(file.names())
    factors = tuple(file.read("rope_freqs.weight").tolist()) if "rope_freqs.weight" in names else ()
    return config_from_gguf(file.metadata, names, factors)


def read_hf_config(path: Path) -> ModelConfig:
    """Returns the configuration of a Hugging Face directory, or of its config.json."""
    return config_from_hf(_read_json(path if path.suffix == ".json" else path / "config.json"))


def read_orbax_config(path: Path) -> tuple[ModelConfig, SamplingParams]:
    """Returns configuration and default sampling of a directory made by `Model.save`."""
    stored = orbax_io.read_config(path)
    try:
        options = dict(stored["model"])
        if options["rope_scaling"]:
            scaling = options["rope_scaling"]
            options["rope_scaling"] = RopeScaling(**scaling | {"factors": tuple(scaling["factors"])})
        for name in ("layer_windows", "layer_rope"):
            options[name] = tuple(options[name])
        return ModelConfig(**options), SamplingParams.from_dict(stored["sampling"])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: jaxinfer.json does not describe a model ({error!r}); save the model again"
        ) from error


def _load_gguf(path: Path, options: _Options) -> Model:
    with GGUFFile(path) as file:
        config = read_gguf_config(file)
        tokenizer = Tokenizer.from_gguf(file.metadata)
        abstract, placements = options.leaves(config)
        plan = {gguf_name(leaf): Target(leaf, gguf_transform(config, leaf)) for leaf in parameter_paths(abstract)}
        plan = options.packed(plan, file, abstract)
        params = load_tree(file, plan, abstract, ignore=IGNORED, shardings=placements, progress=options.progress)
    return Model(options.spec(config, params), params, tokenizer, SamplingParams())


def _load_hf(path: Path, options: _Options) -> Model:
    config = read_hf_config(path)
    tokenizer = Tokenizer.from_directory(path)
    params = load_hf_params(path, config, *options.leaves(config), options.progress, options.packed)
    generation = path / "generation_config.json"
    sampling = _default_sampling(_read_json(generation)) if generation.is_file() else SamplingParams()
    return Model(options.spec(config, params), params, tokenizer, sampling)


def load_hf_params(
    path: Path, config: ModelConfig, abstract: Params, shardings: Any = None, progress: Progress | None = None,
    packed: Callable[..., Mapping[str, Target]] | None = None,
) -> Params:  # fmt: skip
    """Returns the parameters in the safetensors files of a Hugging Face directory, which needs no tokenizer.

    Args:
        path: the directory.
        config: what `config_from_hf` made of its config.json.
        abstract: shapes and dtypes wanted, from `abstract_params`.
        shardings: a tree of the same form, or None for the default device.
        progress: called with bytes done and in all.
        packed: changes the plan (plan, source, abstract) into one that packs matrices.

    Raises:
        ValueError: the files are damaged, or do not hold exactly the model's tensors in the right shapes.
    """
    ignored = [*IGNORED, r"lm_head\.weight"] if config.tie_word_embeddings else IGNORED
    with SafetensorsSource(path) as source:
        plan: Mapping[str, Target] = {hf_name(leaf): Target(leaf) for leaf in parameter_paths(abstract)}
        if packed is not None:
            plan = packed(plan, source, abstract)
        return load_tree(source, plan, abstract, ignore=ignored, shardings=shardings, progress=progress)


def _load_orbax(path: Path, options: _Options) -> Model:
    config, sampling = read_orbax_config(path)
    tokenizer = Tokenizer.from_directory(path)
    params = orbax_io.restore(path, *options.leaves(config))
    if options.progress is not None:  # Orbax reports nothing between
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        options.progress(total, total)
    if options.quantize in ("int8", "int4"):
        params = pack_params(params, options.quantize)
    return Model(options.spec(config, params), params, tokenizer, sampling)


def _default_sampling(generation: Mapping[str, Any]) -> SamplingParams:
    """The authors' recommendation, as vLLM reads it; `do_sample: false` means greedy."""
    given = {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    return SamplingParams.from_dict(given)


def _dtype(name: str | None) -> Any:
    if name is None:
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)} or None, got {name!r}")
    return jnp.dtype(name)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"{path.parent} holds no {path.name}: wanted a GGUF file, a Hugging Face directory or one that "
            "Model.save made"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
