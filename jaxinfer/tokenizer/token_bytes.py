"""The bytes each token stands for, so that text can be decoded one token at a time."""

import json
import re

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenBytes:
    """Maps token ids to bytes; the text of a list of ids is the UTF-8 decoding of their joined bytes.

    Two vocabularies are understood: byte-level BPE, whose characters each stand for one byte, and
    SentencePiece, which writes a space as U+2581 and a byte as "<0xE2>".

    Attributes:
        vocab_size: One more than the largest id.
        special_ids: Ids of the tokens that `skip_special_tokens` leaves out.
        strips_leading_space: Whether a space at the very start of a text is an artefact of the vocabulary.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), max(self._added, default=-1) + 1)
        steps = _decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        self._characters = _gpt2_characters() if kinds == {"ByteLevel"} else None
        if self._characters is None and (not kinds or not kinds <= _SENTENCEPIECE_STEPS):
            raise ValueError(
                f"unsupported tokenizer decoder {sorted(kinds)}: want ByteLevel (byte-level BPE) or some of "
                f"{sorted(_SENTENCEPIECE_STEPS)} (SentencePiece)"
            )
        self._byte_fallback = "ByteFallback" in kinds
        self.strips_leading_space = any(_strips_leading_space(step) for step in steps)
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Returns the bytes of one token; raises ValueError for an id outside the vocabulary."""
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._encode(token_id)
        return found

    def token(self, token_id: int) -> str:
        """Returns the token as the vocabulary spells it; raises ValueError for an unknown id."""
        if not 0 <= token_id < self.vocab_size or (token := self._backend.id_to_token(token_id)) is None:
            raise ValueError(
                f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens; "
                "does this tokenizer belong to the model?"
            )
        return token

    def _encode(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if self._characters is not None:
            # Added tokens are written as plain text, not in GPT-2's byte alphabet.
            if token_id in self._added or not all(character in self._characters for character in token):
                return token.encode()
            return bytes(self._characters[character] for character in token)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()


def _decoder_steps(backend: Backend) -> list[dict]:
    """Returns the decoder's steps as the tokenizer.json format writes them; [] without a decoder."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _strips_leading_space(step: dict) -> bool:
    if step["type"] == "Strip":
        return step["content"] == " " and step["start"] > 0
    return step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def _gpt2_characters() -> dict[str, int]:
    """Returns the byte each character of GPT-2's alphabet stands for.

    Printable Latin-1 characters stand for themselves, the other 68 bytes are numbered from U+0100 on
    (openai/gpt-2, `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
