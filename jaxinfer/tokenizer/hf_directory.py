"""Reads the tokenizer files of a Hugging Face model directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxinfer.tokenizer.parts import TokenizerParts

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_hf_directory(path: str | Path) -> TokenizerParts:
    """Returns the parts of the tokenizer in a model directory.

    Args:
        path: Directory with tokenizer.json; tokenizer_config.json, special_tokens_map.json,
            chat_template.jinja, generation_config.json and config.json are read where they exist.

    Raises:
        ValueError: There is no tokenizer.json, a file is not valid, or the tokenizer adds special tokens
            around a text other than its BOS and EOS.
    """
    directory = Path(path)
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ValueError(
            f"no tokenizer.json in {directory}; want a model directory with the fast tokenizer's file "
            "(save_pretrained of transformers writes it for a model with an older tokenizer)"
        )
    try:
        backend = Backend.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises plain Exception for any bad file
        raise ValueError(f"{tokenizer_file} is not a tokenizer that `tokenizers` can read: {error}") from error
    # Some files were saved with these on; a prompt must never be cut or padded silently.
    backend.no_truncation()
    backend.no_padding()

    config = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    bos_token_id = _token_id(backend, special_tokens, "bos_token")
    eos_token_id = _token_id(backend, special_tokens, "eos_token")
    add_bos, add_eos = _added_tokens(backend, bos_token_id, eos_token_id)
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos_token_id,
        eos_token_ids=_eos_token_ids(directory, eos_token_id),
        chat_template=_chat_template(directory, config),
        # Like transformers: the flags overrule tokenizer.json, and add_bos_token without a BOS means nothing.
        add_bos=bos_token_id is not None and bool(_given(config, "add_bos_token", add_bos)),
        add_eos=eos_token_id is not None and bool(_given(config, "add_eos_token", add_eos)),
        special_tokens=special_tokens,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in an optional file, {} where there is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _given(config: Mapping[str, Any], name: str, default: bool) -> bool:
    return default if config.get(name) is None else config[name]


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _SPECIAL_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value  # a serialized AddedToken
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _token_id(backend: Backend, special_tokens: Mapping[str, str], name: str) -> int | None:
    if name not in special_tokens:
        return None
    token_id = backend.token_to_id(special_tokens[name])
    if token_id is None:
        raise ValueError(f"{name} {special_tokens[name]!r} of tokenizer_config.json is not in tokenizer.json")
    return token_id


def _added_tokens(backend: Backend, bos_token_id: int | None, eos_token_id: int | None) -> tuple[bool, bool]:
    """Returns whether the file's post-processor puts BOS before and EOS after a text."""
    added = backend.encode("", add_special_tokens=True).ids
    for add_bos, add_eos in ((False, False), (True, False), (False, True), (True, True)):
        if added == [bos_token_id] * add_bos + [eos_token_id] * add_eos:
            return add_bos, add_eos
    raise ValueError(
        f"the post-processor of tokenizer.json adds {[backend.id_to_token(i) for i in added]} around every "
        "text; only the BOS token before it and the EOS token after it are supported"
    )


def _eos_token_ids(directory: Path, eos_token_id: int | None) -> tuple[int, ...]:
    """Returns the ids that end a generation: the tokenizer's own, then the model's."""
    ids = _read_json(directory / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = _read_json(directory / "config.json").get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(token_id for token_id in [eos_token_id, *ids] if token_id is not None))


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template
