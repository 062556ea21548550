"""`KVSpec`: how keys and values are stored, and the bytes that takes. Imports no jax."""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """Bits of an element, and the f32 scales stored for each token of each KV head."""

    bits: int
    scales: int = 0


FORMATS = {
    "float32": KVFormat(32),
    "bfloat16": KVFormat(16),
    "float16": KVFormat(16),
    "float8": KVFormat(8, scales=1),  # e4m3fn
    "int8": KVFormat(8, scales=1),
}


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """The precision of a KV cache: names in `FORMATS`, of keys and of values.

    "float8" and "int8" have one scale for each token and KV head, so that a token is stored the same way whatever
    is computed beside it.
    """

    k: str
    v: str

    def __post_init__(self):
        """Checks both names.

        Raises:
            ValueError: a name is not in `FORMATS`.
        """
        for name in (self.k, self.v):
            if name not in FORMATS:
                raise ValueError(_wanted(name))

    @classmethod
    def parse(cls, kv_dtype: str, dtype: Any) -> "KVSpec":
        """Returns the spec that `EngineConfig.kv_dtype` names.

        Args:
            kv_dtype: a name in `FORMATS` or "auto", for both, or two of them as "K,V".
            dtype: what "auto" stands for: the decoder's dtype, or its name.

        Raises:
            ValueError: not one or two such names.
        """
        names = kv_dtype.split(",") if isinstance(kv_dtype, str) else []
        if len(names) not in (1, 2):
            raise ValueError(_wanted(kv_dtype))
        auto = dtype if isinstance(dtype, str) else dtype.name
        k, *rest = (auto if name.strip() == "auto" else name.strip() for name in names)
        return cls(k, *(rest or (k,)))

    def page_bytes(self, model: "ModelConfig", page_size: int) -> int:
        """Returns the bytes of one page of keys and values in all layers, scales included."""
        per_token = sum(model.head_dim * x.bits // 8 + 4 * x.scales for x in (FORMATS[self.k], FORMATS[self.v]))
        return model.num_layers * model.num_kv_heads * page_size * per_token

    def bytes_per_token(self, model: "ModelConfig") -> int:
        """Returns the bytes of one token in all layers, scales included."""
        return self.page_bytes(model, 1)

    def __str__(self) -> str:
        """The shortest text that `parse` reads back."""
        return self.k if self.k == self.v else f"{self.k},{self.v}"


def _wanted(got: object) -> str:
    return f'kv_dtype must be "auto", one of {", ".join(FORMATS)}, or two of these as "K,V", got {got!r}'
