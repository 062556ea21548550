"""`describe`: what a model is, from its metadata alone."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from checkpoints import orbax_io
from checkpoints.gguf_io import GGUFFile
from checkpoints.safetensors_io import SafetensorsSource
from checkpoints.sources import TensorSource
from jaxinfer.config import ModelConfig
from jaxinfer.loading import read_gguf_config, read_hf_config, read_orbax_config
from jaxinfer.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Description:
    """A model's configuration and how it is stored."""

    path: Path
    format: str
    config: ModelConfig
    stored_types: Mapping[str, int]  # type name: number of tensors
    num_bytes: int
    has_chat_template: bool
    eos_tokens: tuple[str, ...]


def describe(path: Path) -> Description:
    """Returns the description of a GGUF file, a Hugging Face directory or an Orbax directory.

    Raises:
        ValueError: see `load`; the weights themselves are not read.
    """
    if path.is_file():
        with GGUFFile(path) as file:
            config, tokenizer = read_gguf_config(file), Tokenizer.from_gguf(file.metadata)
            return _describe(path, "GGUF", config, _types(file), tokenizer)
    if orbax_io.is_checkpoint(path):
        config, _ = read_orbax_config(path)
        dtype = str(orbax_io.read_config(path).get("dtype", "unknown"))
        return _describe(path, "Orbax", config, {dtype: 0}, Tokenizer.from_directory(path))
    config = read_hf_config(path)
    with SafetensorsSource(path) as source:
        return _describe(path, "safetensors", config, _types(source), Tokenizer.from_directory(path))


def read_config(path: Path) -> ModelConfig:
    """Returns the configuration alone, of what `describe` reads or of a Hugging Face config.json.

    Raises:
        ValueError: see `load`.
    """
    if path.is_file() and path.suffix != ".json":
        with GGUFFile(path) as file:
            return read_gguf_config(file)
    if orbax_io.is_checkpoint(path):
        return read_orbax_config(path)[0]
    return read_hf_config(path)


def _types(source: TensorSource) -> Mapping[str, int]:
    return dict(Counter(source.spec(name).dtype for name in source.names()).most_common())


def _describe(
    path: Path, format: str, config: ModelConfig, types: Mapping[str, int], tokenizer: Tokenizer
) -> Description:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return Description(
        path, format, config, types, sum(file.stat().st_size for file in files), tokenizer.chat_template is not None,
        tuple(tokenizer.id_to_token(token) for token in tokenizer.eos_token_ids),
    )  # fmt: skip
