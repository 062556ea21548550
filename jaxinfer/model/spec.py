"""What makes a decoder, without its modules: a process that finds its programs compiled never imports those."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxinfer.config import ModelConfig

if TYPE_CHECKING:
    from jaxinfer.model.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """The fields of `Decoder`, which says what they mean."""

    config: ModelConfig
    dtype: Any
    implementation: str | None = None
    activations: str | None = None

    def build(self) -> "Decoder":
        """Returns the linen module."""
        from jaxinfer.model.decoder import Decoder

        return Decoder(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
