"""`KVSpec`: how keys and values are stored, and the bytes that takes. Imports no jax."""

import dataclasses
from typing import Any, Protocol

GROUP = 32  # the page size must be a multiple of it where keys have a scale for each channel of a page


class CacheShape(Protocol):
    """What `ModelConfig` says of a cache."""

    @property
    def num_layers(self) -> int:
        """L."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """K."""
        ...

    @property
    def head_dim(self) -> int:
        """H."""
        ...


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """Bits of an element, and the f32 numbers stored beside a token of a KV head: scale and zero point.

    `by_page`: a page is quantized when it is full. Keys then have their scales by channel, once a page.
    """

    bits: int
    scales: int = 0
    by_page: bool = False

    def bytes(self, head_dim: int, page_size: int, is_key: bool) -> int:
        """Returns the bytes of a page of one head."""
        scales = self.scales * (head_dim if self.by_page and is_key else page_size)
        return page_size * head_dim * self.bits // 8 + 4 * scales


FORMATS = {
    "float32": KVFormat(32),
    "bfloat16": KVFormat(16),
    "float16": KVFormat(16),
    "float8": KVFormat(8, scales=1),  # e4m3fn
    "int8": KVFormat(8, scales=1),
    "int4": KVFormat(4, scales=2, by_page=True),
    "int2": KVFormat(2, scales=2, by_page=True),
}


@dataclasses.dataclass(frozen=True, order=True)
class KVSpec:
    """The precision of a KV cache.

    "float8" and "int8" have one scale for each token and KV head, so that a token is stored the same way whatever
    is computed beside it. "int4" and "int2" are those of KIVI (Liu et al., 2024): keys by channel, values by token.

    Attributes:
        k: name in `FORMATS`, of keys.
        v: of values.
        open: of the page that a row has not yet filled, if either is quantized by the page; else None.
    """

    k: str
    v: str
    open: str | None = None

    def __post_init__(self):
        """Checks the names.

        Raises:
            ValueError: a name is not in `FORMATS`, or `open` is missing or superfluous.
        """
        for name in (self.k, self.v, self.open or self.k):
            if name not in FORMATS:
                raise ValueError(_wanted(name))
        if (self.open is not None) != (FORMATS[self.k].by_page or FORMATS[self.v].by_page):
            raise ValueError(f"open must be given with int4 and int2, and not else, got {self}")

    @classmethod
    def parse(cls, kv_dtype: str, dtype: Any) -> "KVSpec":
        """Returns the spec that `EngineConfig.kv_dtype` names.

        Args:
            kv_dtype: a name in `FORMATS` or "auto", for both, or two of them as "K,V".
            dtype: what "auto" stands for: the decoder's dtype, or its name. Open pages have it as well.

        Raises:
            ValueError: not one or two such names.
        """
        names = kv_dtype.split(",") if isinstance(kv_dtype, str) else []
        auto = dtype if isinstance(dtype, str) else dtype.name
        names = [auto if name.strip() == "auto" else name.strip() for name in names]
        if len(names) not in (1, 2) or not set(names) <= set(FORMATS):
            raise ValueError(_wanted(kv_dtype))
        return cls(names[0], names[-1], auto if any(FORMATS[name].by_page for name in names) else None)

    @property
    def page_size(self) -> int:
        """Tokens of a page that suit this precision, where nobody says otherwise."""
        return 16 if self.open is None else 2 * GROUP

    def page_bytes(self, model: CacheShape, page_size: int) -> int:
        """Returns the bytes of one page of keys and values in all layers, scales included."""
        k = FORMATS[self.k].bytes(model.head_dim, page_size, is_key=True)
        v = FORMATS[self.v].bytes(model.head_dim, page_size, is_key=False)
        return model.num_layers * model.num_kv_heads * (k + v)

    def bytes_per_token(self, model: CacheShape, page_size: int | None = None) -> int:
        """Returns the bytes of one token of a full page in all layers, scales included."""
        size = page_size or self.page_size
        return -(-self.page_bytes(model, size) // size)

    def open_bytes(self, model: CacheShape, page_size: int) -> int:
        """Returns the bytes of a row's open page in all layers."""
        return 0 if self.open is None else KVSpec(self.open, self.open).page_bytes(model, page_size)

    def __str__(self) -> str:
        """The shortest text that `parse` reads back."""
        return self.k if self.k == self.v else f"{self.k},{self.v}"


def _wanted(got: object) -> str:
    return f'kv_dtype must be "auto", one of {", ".join(FORMATS)}, or two of these as "K,V", got {got!r}'
