"""Rebuilds a tokenizer from the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from jaxinfer.tokenizer import sentencepiece_bpe
from jaxinfer.tokenizer.parts import TokenizerParts
from jaxinfer.tokenizer.pretokenizers import find_pre_tokenizer

# gguf.TokenType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

# Control tokens that end a turn or a document whatever the file calls them: many files name only one of
# the two that their model may produce. The list is the unambiguous part of llama.cpp's.
_END_TOKENS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "</s>",
    }
)


def read_gguf_metadata(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Returns the parts of the tokenizer that GGUF metadata describes.

    Args:
        metadata: Key to plain Python value (str, int, bool, list), as a GGUF reader gives them.

    Raises:
        ValueError: A key is missing, the lists disagree in length, or the kind of tokenizer is not supported.
    """
    model = _require(metadata, "tokenizer.ggml.model")
    tokens = list(_require(metadata, "tokenizer.ggml.tokens"))
    types = list(metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(types)} entries, want one per token: {len(tokens)}")
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens repeats {len(tokens) - len(set(tokens))} of {len(tokens)} tokens")
    if model == "gpt2":
        backend, add_bos = _byte_level_bpe(metadata, tokens)
        default_ids = {}
    elif model == "llama":
        backend, add_bos = _sentencepiece_bpe(metadata, tokens, types)
        default_ids = {"bos": 1, "eos": 2, "unknown": 0}
    else:
        raise ValueError(
            f"unsupported tokenizer.ggml.model {model!r}: want 'gpt2' (byte-level BPE) or 'llama' "
            "(SentencePiece BPE). If the model has a tokenizer.json, load the tokenizer from its directory."
        )
    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    ids = {name: _token_id(metadata, name, len(tokens), default_ids.get(name)) for name in _TOKEN_NAMES}
    return TokenizerParts(
        backend=backend,
        bos_token_id=ids["bos"],
        eos_token_ids=_end_token_ids(ids, tokens, types),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        special_tokens={
            variable: tokens[token_id]
            for name, variable in _TEMPLATE_NAMES.items()
            if (token_id := ids[name]) is not None
        },
    )


_TOKEN_NAMES = ("bos", "eos", "eot", "eom", "unknown", "padding")
_TEMPLATE_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Backend, bool]:
    if "tokenizer.ggml.pre" not in metadata:
        raise ValueError(
            "the GGUF metadata has no tokenizer.ggml.pre, which says how to split text into words and which "
            "older converters left out. Convert the model again, or set the key, for example to 'llama-bpe'"
        )
    pre = find_pre_tokenizer(metadata["tokenizer.ggml.pre"])
    merges = [tuple(merge.split(" ")) for merge in _require(metadata, "tokenizer.ggml.merges")]
    if bad := [" ".join(merge) for merge in merges if len(merge) != 2]:
        raise ValueError(f"tokenizer.ggml.merges wants two tokens joined by a space, got {bad[0]!r}")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # add_space_prefix is for SentencePiece: files set it here too, and llama.cpp ignores it as well.
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    if (normalizer := pre.normalizer()) is not None:
        backend.normalizer = normalizer
    return backend, pre.add_bos


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[Backend, bool]:
    scores = list(_require(metadata, "tokenizer.ggml.scores"))
    if len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores has {len(scores)} entries, want one per token: {len(tokens)}")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise ValueError("tokenizer.ggml.remove_extra_whitespaces is not supported for SentencePiece BPE")
    unknown = next((token for token, kind in zip(tokens, types) if kind == UNKNOWN), None)
    mergeable = [kind in (NORMAL, USER_DEFINED) for kind in types]
    add_space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend = Backend(sentencepiece_bpe.build_model(tokens, scores, mergeable, unknown))
    backend.normalizer = sentencepiece_bpe.build_normalizer(add_space_prefix)
    backend.decoder = sentencepiece_bpe.build_decoder(add_space_prefix)
    return backend, True


def _end_token_ids(ids: Mapping[str, int | None], tokens: Sequence[str], types: Sequence[int]) -> tuple[int, ...]:
    named = [ids[name] for name in ("eos", "eot", "eom")]
    known = [i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == CONTROL and token in _END_TOKENS]
    return tuple(dict.fromkeys(token_id for token_id in [*named, *known] if token_id is not None))


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key, default)
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise ValueError(f"{key} is {token_id}, outside the vocabulary of {vocab_size} tokens")
    return token_id


def _require(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"the GGUF metadata has no {key}; it cannot describe a tokenizer without it")
    return metadata[key]
