"""Grammars: which tokens may follow, by llguidance (Earley parsing over token tries). Imports no jax.

A request with a grammar samples a token only after the host has read the one before. From then on its next mask is
computed in another thread, without Python's lock, while the device works on the step of everybody else.
"""

import functools
import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.sampling.structured import StructuredOutputs

if TYPE_CHECKING:
    from jaxinfer.tokenizer import Tokenizer

CACHED = 64  # compiled grammars kept, since many requests ask for the same
WHITESPACE = r"(\r?\n)?[\x20\x09]{0,12}"  # between the parts of JSON; without a bound some models write it for ever


class GrammarError(ValueError):
    """A schema or grammar that cannot be compiled, with llguidance's reason."""


class Grammar:
    """The grammar of one request, after the tokens that it has accepted."""

    def __init__(self, matcher: Any, num_words: int, pool: ThreadPoolExecutor):
        """Takes a matcher of its own and starts to compute the mask of the next token."""
        self._matcher = matcher
        self._num_words = num_words
        self._pool = pool
        self._mask: Future[np.ndarray] = pool.submit(self._compute)

    def accept(self, token: int) -> None:
        """Goes on by a token, which the mask before has allowed."""
        self._mask.result()
        if not self._matcher.is_error():
            self._matcher.consume_token(token)
            self._mask = self._pool.submit(self._compute)

    def mask(self) -> np.ndarray:
        """Returns uint32[ceil(V / 32)]: bit i of word w allows token 32 w + i. After an error, no token."""
        return self._mask.result()

    @property
    def error(self) -> str | None:
        """Why it cannot go on: some grammars prove too complex only when they are used."""
        return self._matcher.get_error() or None

    def fork(self) -> "Grammar":
        """Returns another one, as far as this."""
        self._mask.result()
        return Grammar(self._matcher.deep_copy(), self._num_words, self._pool)

    def _compute(self) -> np.ndarray:
        words = np.zeros(self._num_words, np.uint32)
        if not self._matcher.is_error():
            allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            if not self._matcher.is_error():
                words[: len(allowed)] = allowed[: self._num_words]
        return words


class GrammarCompiler:
    """Makes the grammars of one model's requests; threads may share it."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int):
        """Takes the model's tokenizer and the number of its logits."""
        self._tokenizer = tokenizer
        self._num_words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._matcher = functools.lru_cache(CACHED)(self._compile)

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Returns a grammar at its start; the same one is compiled once.

        Raises:
            GrammarError: it cannot be compiled.
            ValueError: the model has no end-of-sequence token.
        """
        return Grammar(self._matcher(wanted).deep_copy(), self._num_words, _pool())

    def _compile(self, wanted: StructuredOutputs) -> Any:
        with self._lock:
            tokenizer = self._ll_tokenizer
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, _source(wanted), log_level=0)
        if matcher.is_error():
            raise GrammarError(f"structured_outputs.{wanted.kind} cannot be compiled: {matcher.get_error().strip()}")
        return matcher

    @functools.cached_property
    def _ll_tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        eos = self._tokenizer.eos_token_ids
        if not eos:
            raise ValueError("structured_outputs needs a model with an end-of-sequence token, to end the text with")
        size = self._tokenizer.vocab_size
        return LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer)), n_vocab=size, eos_token=list(eos))


class _Vocabulary:
    """The tokenizer as llguidance wants it: the bytes of each token."""

    def __init__(self, tokenizer: "Tokenizer"):
        special = tokenizer.special_token_ids | set(tokenizer.eos_token_ids)
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(special)
        self.tokens = [_token_bytes(tokenizer, i) for i in range(tokenizer.vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> Sequence[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _token_bytes(tokenizer: "Tokenizer", token_id: int) -> bytes:
    try:
        return tokenizer.token_bytes(token_id)
    except ValueError:  # a hole in the vocabulary
        return b""


def _source(wanted: StructuredOutputs) -> str:
    """Returns the grammar in llguidance's own form."""
    from llguidance import LLMatcher, grammar_from

    options: Any = {"whitespace_pattern": WHITESPACE}
    match wanted.kind:
        case "json":
            return LLMatcher.grammar_from_json_schema(str(wanted.json), defaults=options)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=options)
        case "choice":
            return grammar_from("choice", json.dumps(list(wanted.choice or ())))
        case "regex":
            return grammar_from("regex", str(wanted.regex))
        case _:
            try:
                return grammar_from("grammar", str(wanted.grammar))
            except ValueError as error:
                raise GrammarError(f"structured_outputs.grammar cannot be compiled: {error}") from error


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="grammar")
