"""Text to token ids and back."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as Backend

from jaxinfer.tokenizer.chat_template import ChatTemplate
from jaxinfer.tokenizer.gguf_metadata import read_gguf_metadata
from jaxinfer.tokenizer.hf_directory import read_hf_directory
from jaxinfer.tokenizer.parts import TokenizerParts
from jaxinfer.tokenizer.token_bytes import TokenBytes


class Tokenizer:
    """A model's tokenizer and chat template; immutable.

    Usually made by `from_directory` or `from_gguf`.

    Args:
        backend: The `tokenizers` object that does the work. Its post-processor is not used.
        bos_token_id: Id of the token that begins a sequence, if the model has one.
        eos_token_ids: Ids that end a generation, the tokenizer's or model's main one first.
        chat_template: jinja2 source, or None for a model that does not chat.
        add_bos: Whether `encode` puts BOS before a text.
        add_eos: Whether `encode` puts EOS after a text (rare for generating models).
        special_tokens: Strings the chat template may use, by variable name (bos_token, eos_token, ...).

    Raises:
        ValueError: A token id is missing or outside the vocabulary, or the vocabulary is of a kind that
            cannot be decoded token by token.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        special_tokens: Mapping[str, str] | None = None,
    ):
        if add_bos and bos_token_id is None:
            raise ValueError("add_bos=True wants a bos_token_id, got None; pass the id or add_bos=False")
        if add_eos and not eos_token_ids:
            raise ValueError("add_eos=True wants an entry in eos_token_ids, got none; pass one or add_eos=False")
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._token_bytes = TokenBytes(backend)
        self._bos_token_id = bos_token_id
        self._eos_token_ids = tuple(eos_token_ids)
        self._prefix = [bos_token_id] if add_bos and bos_token_id is not None else []
        self._suffix = [self._eos_token_ids[0]] if add_eos else []
        self._chat_template = ChatTemplate(chat_template, self._special_tokens) if chat_template else None
        for token_id in {*self._prefix, *self._eos_token_ids}:
            self._token_bytes.token(token_id)

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Returns the tokenizer of a Hugging Face model directory (see `read_hf_directory`).

        Raises:
            ValueError: The directory has no tokenizer.json or its files cannot be understood.
        """
        return cls._from_parts(read_hf_directory(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Returns the tokenizer that a GGUF file describes.

        Args:
            metadata: The file's metadata as plain Python values, "tokenizer.ggml.tokens" a list of str, etc.

        Raises:
            ValueError: A key is missing or of a kind that is not supported; the message lists what is.
        """
        return cls._from_parts(read_gguf_metadata(metadata))

    @classmethod
    def _from_parts(cls, parts: TokenizerParts) -> Self:
        return cls(
            parts.backend,
            bos_token_id=parts.bos_token_id,
            eos_token_ids=parts.eos_token_ids,
            chat_template=parts.chat_template,
            add_bos=parts.add_bos,
            add_eos=parts.add_eos,
            special_tokens=parts.special_tokens,
        )

    def save(self, path: str | Path) -> list[Path]:
        """Writes the files from which `from_directory` makes this tokenizer again, and returns their paths."""
        directory = Path(path)
        settings = dict(self._special_tokens) | {
            "add_bos_token": bool(self._prefix),
            "add_eos_token": bool(self._suffix),
            "chat_template": self.chat_template,
        }
        files = {
            "tokenizer.json": self._backend.to_str(),
            "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2),
            "generation_config.json": json.dumps({"eos_token_id": list(self._eos_token_ids)}),
        }
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
        return [directory / name for name in files]

    @property
    def vocab_size(self) -> int:
        """Number of ids, one more than the largest; a model's logits may be wider (padding)."""
        return self._token_bytes.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a sequence."""
        return self._bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        return self._eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out unless told otherwise."""
        return self._token_bytes.special_ids

    @property
    def chat_template(self) -> str | None:
        """The jinja2 source of the chat template."""
        return self._chat_template.source if self._chat_template else None

    @property
    def strips_leading_space(self) -> bool:
        """Whether `decode` drops a space at the start of a text (SentencePiece puts one there)."""
        return self._token_bytes.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Special tokens written in the text, such as "<|im_start|>", become those tokens. BOS is put in front
        where the model wants it, unless the text begins with it already, as a rendered chat template may.

        Args:
            text: Any text; "" gives only the special tokens.
            add_special_tokens: Add BOS and EOS as the model wants.

        Raises:
            ValueError: Not a str, or a str that has no UTF-8 form (lone surrogates).
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except TypeError as error:
            raise ValueError(f"text must be a str of valid Unicode, got {text!r:.80}") from error
        if not add_special_tokens:
            return ids
        prefix = self._prefix if ids[:1] != self._prefix else []
        suffix = self._suffix if ids[-1:] != self._suffix else []
        return prefix + ids + suffix

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Returns the text of token ids; bytes that are not valid UTF-8 become U+FFFD.

        Args:
            ids: Token ids.
            skip_special_tokens: Leave out tokens such as "<|im_end|>".
            continuation: The ids continue an earlier text, so a leading space is kept.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        skipped = self._token_bytes.special_ids if skip_special_tokens else ()
        data = b"".join(self._token_bytes[token_id] for token_id in ids if token_id not in skipped)
        if self.strips_leading_space and not continuation:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def id_to_token(self, token_id: int) -> str:
        """Returns a token as the vocabulary spells it; ValueError for an id outside the vocabulary."""
        return self._token_bytes.token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes a token stands for, perhaps part of a character; ValueError for an unknown id.

        A special token's bytes are its name ("<|im_end|>").
        """
        return self._token_bytes[token_id]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Returns a conversation as the text the model was trained on; see `ChatTemplate.render`.

        Args:
            messages: Mappings with "role" and "content" (or "tool_calls"), oldest first.
            tools: JSON schemas of the functions the model may call.
            add_generation_prompt: End with the start of the assistant's turn.
            template_kwargs: Further variables for the template.

        Raises:
            ValueError: The model has no chat template, a message has the wrong form, or the template refuses.
        """
        if self._chat_template is None:
            raise ValueError(
                "this model has no chat template: generate from plain text, or make the tokenizer with "
                "chat_template='<jinja2 source>'"
            )
        return self._chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
