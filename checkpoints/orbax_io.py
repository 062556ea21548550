"""Saves and restores a converted model as one directory, the arrays by Orbax.

jaxinfer.json     {"format": "jaxinfer", "version": 1, "config": {...}}
params/           the Orbax checkpoint of the parameter tree
tokenizer.json    and whatever other files the model needs beside its weights
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from checkpoints.trees import flatten, unflatten

CONFIG_NAME, PARAMS_NAME = "jaxinfer.json", "params"
FORMAT, VERSION = "jaxinfer", 1


def is_checkpoint(path: Path | str) -> bool:
    """True for a directory that `save` has written."""
    return (Path(path) / CONFIG_NAME).is_file()


def save(
    path: Path | str, params: Mapping[str, Any], config: Mapping[str, Any], files: Sequence[Path | str] = ()
) -> None:
    """Writes a new directory; it appears whole or not at all.

    Args:
        path: must not exist yet.
        params: nested dict of jax.Array.
        config: goes into jaxinfer.json.
        files: copied beside the arrays under their own names: tokenizer.json, chat_template.jinja, ...

    Raises:
        ValueError: the path exists, config is not JSON, a file is missing or its name is reserved, or Orbax
            is not installed.
    """
    path, sources = Path(path).absolute(), [Path(file) for file in files]
    orbax = _orbax()
    if path.exists():
        raise ValueError(f"{path}: exists already; save to a new path, or remove this one first")
    if jax.process_count() != 1:
        raise ValueError(f"save works in a single process, got {jax.process_count()}; save on one host")
    names = [source.name for source in sources]
    for source in sources:
        if source.name in (CONFIG_NAME, PARAMS_NAME) or names.count(source.name) > 1:
            raise ValueError(f"{source}: the name {source.name!r} is taken in a checkpoint; rename the file")
        if not source.is_file():
            raise ValueError(f"{source}: wanted a file to copy into the checkpoint, got no file at this path")
    try:
        text = json.dumps({"format": FORMAT, "version": VERSION, "config": config}, indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"config must be plain JSON values: {error}") from error

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        whole = Path(temporary) / path.name
        whole.mkdir()
        for source in sources:
            shutil.copyfile(source, whole / source.name)
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(whole / PARAMS_NAME, dict(params))
            checkpointer.wait_until_finished()
        (whole / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")
        os.rename(whole, path)


def read_config(path: Path | str) -> dict[str, Any]:
    """The config given to `save`; needs no Orbax.

    Raises:
        ValueError: not a directory written by `save`, damaged, or of a newer version.
    """
    file = Path(path) / CONFIG_NAME
    if not file.is_file():
        raise ValueError(
            f"{path}: wanted a directory saved by jaxinfer, got one without {CONFIG_NAME}; convert it first"
        )
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error}); the checkpoint is damaged, save it again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f'{file}: wanted "format": "{FORMAT}", got something else; this is not a jaxinfer checkpoint')
    if content.get("version") != VERSION or not isinstance(content.get("config"), dict):
        raise ValueError(
            f"{file}: wanted version {VERSION} with a config, got version {content.get('version')!r}; "
            f"upgrade jaxinfer or save the checkpoint again"
        )
    return content["config"]


def restore(path: Path | str, abstract: Mapping[str, Any], shardings: Any = None) -> dict[str, Any]:
    """Restores the arrays, each device reading its own part.

    Args:
        path: a directory written by `save`.
        abstract: nested dict of jax.ShapeDtypeStruct; stored values are cast to its dtypes.
        shardings: one jax.sharding.Sharding for all, or a nested dict like `abstract`. None: each leaf's own,
            or the default device (never the placement it was saved with).

    Returns:
        A nested dict like `abstract` of jax.Array.

    Raises:
        ValueError: foreign or damaged directory, other names or shapes than `abstract`, or Orbax is missing.
    """
    path = Path(path).absolute()
    read_config(path)
    orbax = _orbax()
    wanted = _wanted(abstract, shardings)
    with orbax.StandardCheckpointer() as checkpointer:
        try:
            stored = flatten(checkpointer.metadata(path / PARAMS_NAME).item_metadata.tree)
        except Exception as error:  # Orbax itself raises plain Exception
            raise _damaged(path, error) from error
        _compare(path, {name: tuple(meta.shape) for name, meta in stored.items()}, wanted)
        try:
            return checkpointer.restore(path / PARAMS_NAME, unflatten(wanted))
        except Exception as error:  # Orbax itself raises plain Exception
            raise _damaged(path, error) from error


def _wanted(abstract: Mapping[str, Any], shardings: Any) -> dict[str, jax.ShapeDtypeStruct]:
    leaves = flatten(abstract)
    if shardings is None:
        default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = {path: leaf.sharding or default for path, leaf in leaves.items()}
    elif isinstance(shardings, jax.sharding.Sharding):
        places = dict.fromkeys(leaves, shardings)
    else:
        places = flatten(shardings)
        if differing := sorted(places.keys() ^ leaves.keys()):
            raise ValueError(f"shardings and abstract tree have different leaves: {', '.join(differing[:10])}")
    return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[path]) for path, leaf in leaves.items()}


def _compare(path: Path, stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    problems = {
        "leaves that the checkpoint lacks": sorted(wanted.keys() - stored.keys()),
        "leaves that the model does not have": sorted(stored.keys() - wanted.keys()),
        "wrong shapes": [
            f"{name}: wanted {list(wanted[name].shape)}, got {list(shape)}"
            for name, shape in stored.items()
            if name in wanted and shape != wanted[name].shape
        ],
    }
    lines = [f"  {len(found)} {kind}: {', '.join(found[:10])}" for kind, found in problems.items() if found]
    if lines:
        raise ValueError(f"{path} does not fit the model:\n" + "\n".join(lines))


def _damaged(path: Path, error: Exception) -> ValueError:
    root: BaseException = error
    while root.__cause__ is not None:  # Orbax wraps TensorStore's reason in pages of its own
        root = root.__cause__
    reason = f"{type(root).__name__}: {str(root).partition('\n')[0][:300]}"
    return ValueError(f"{path / PARAMS_NAME}: cannot be read; the checkpoint is damaged, save it again ({reason})")


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ValueError(
            'saving and restoring need Orbax, which is not installed: pip install "jaxinfer[orbax]"'
        ) from error
    return orbax.checkpoint
