"""Turns a request's token ids into text as they arrive."""

import codecs
from collections.abc import Sequence

from jaxinfer.tokenizer.stop_strings import StopMatcher
from jaxinfer.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Emits text only when it is final; constant work per token, however long the output.

    Held back are the bytes of an unfinished UTF-8 character and any text that a stop string could begin with.
    Without a stop, all pushes and the flush joined equal `tokenizer.decode` of all ids, however they are cut
    into pushes.

    Args:
        tokenizer: The model's tokenizer.
        stop: Strings that end the output. Special tokens take part only with skip_special_tokens=False.
        stop_from: Number of tokens whose text is not searched for stop strings.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        skip_special_tokens: Leave out tokens such as "<|im_end|>".
        continuation: The ids continue an earlier text, so a leading space is kept.

    Raises:
        ValueError: `stop` is not a sequence of non-empty strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        stop_from: int = 0,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        continuation: bool = False,
    ):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._strip_space = tokenizer.strips_leading_space and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stop, include_in_output=include_stop_str_in_output)
        self._stop_from = stop_from
        self._emitted: list[str] = []
        self._num_tokens = 0
        self._stop_token_index: int | None = None
        self._flushed = False

    @property
    def text(self) -> str:
        """All text emitted so far."""
        self._emitted = ["".join(self._emitted)]
        return self._emitted[0]

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the output, or None."""
        return self._matcher.matched

    @property
    def stop_token_index(self) -> int | None:
        """Index, among all ids pushed, of the one that completed the stop string (later ids are surplus)."""
        return self._stop_token_index

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these ids make final; ids after a stop string are ignored.

        Raises:
            ValueError: An id is outside the vocabulary, or `flush` was called before.
        """
        if self._flushed:
            raise ValueError("push after flush: make a new IncrementalDetokenizer for a new output")
        pieces = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
            pieces.append(self._advance(data, final=False))
            self._num_tokens += 1
        return self._emit("".join(pieces))

    def flush(self) -> str:
        """Returns the remaining text at the end of the output; "" after a stop string."""
        if self._flushed:
            return ""
        self._flushed = True
        # An unfinished character becomes U+FFFD here, which may still complete a stop string.
        return self._emit(self._advance(b"", final=True) + self._matcher.flush())

    def _advance(self, data: bytes, *, final: bool) -> str:
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        text = self._decoder.decode(data, final)
        if final or self._num_tokens >= self._stop_from:
            text = self._matcher.push(text)
        if self.stopped is not None and self._stop_token_index is None:
            self._stop_token_index = max(self._num_tokens - 1, 0) if final else self._num_tokens
        return text

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text
