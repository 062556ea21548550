"""Log-probabilities in the two forms of OpenAI's API."""

import codecs
from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.outputs import TokenLogprobs
from jaxinfer.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; OpenAI writes this for a token that is ruled out


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], count: int
) -> list[dict[str, Any]]:
    """Returns one entry a token of a chat's answer, with its `count` most probable alternatives."""
    return [
        _chat_token(tokenizer, token_id, entry)
        | {"top_logprobs": [_chat_token(tokenizer, other, entry) for other in _most_probable(entry, count)]}
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


class CompletionLogprobs:
    """Log-probabilities of one completion, which know where in its text each token begins."""

    def __init__(self, tokenizer: Tokenizer, count: int):
        """Reports `count` alternatives a token."""
        self._tokenizer = tokenizer
        self._count = count
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, list]:
        """Returns the four columns of further tokens; an entry is None for the first token of a prompt."""
        columns: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            columns["tokens"].append(_name(self._tokenizer, token_id))
            columns["token_logprobs"].append(None if entry is None else _number(entry, token_id))
            columns["top_logprobs"].append(None if entry is None else self._top(token_id, entry))
            columns["text_offset"].append(self._offset)
            if token_id not in self._tokenizer.special_token_ids:
                self._offset += len(self._decoder.decode(_bytes(self._tokenizer, token_id)))
        return columns

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        shown = dict.fromkeys([*_most_probable(entry, self._count), token_id])
        return {_name(self._tokenizer, other): _number(entry, other) for other in shown}


def _most_probable(entry: TokenLogprobs, count: int) -> list[int]:
    return sorted(entry, key=lambda token_id: -entry[token_id].logprob)[:count]


def _chat_token(tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs) -> dict[str, Any]:
    data = _bytes(tokenizer, token_id)
    return {"token": data.decode(errors="replace"), "logprob": _number(entry, token_id), "bytes": list(data)}


def _number(entry: TokenLogprobs, token_id: int) -> float:
    return max(entry[token_id].logprob, LOWEST)


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    known = token_id < tokenizer.vocab_size  # logits may be wider than the vocabulary
    return tokenizer.token_bytes(token_id) if known else b""


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a token as a key that differs from those of others: its text, or its bytes where that is cut."""
    data = _bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
