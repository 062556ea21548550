"""What the readers of tokenizer files hand to `Tokenizer`."""

import dataclasses
from collections.abc import Mapping

from tokenizers import Tokenizer as Backend


@dataclasses.dataclass(frozen=True)
class TokenizerParts:
    """The arguments of `Tokenizer`, under the same names."""

    backend: Backend
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    add_bos: bool
    add_eos: bool
    special_tokens: Mapping[str, str]
