"""`H2O`: the budget of a request that forgets; no jax."""

import dataclasses
from typing import Self

from jaxinfer.sampling import checks


@dataclasses.dataclass(frozen=True)
class H2O:
    """How many keys and values a request keeps, as in H2O (Zhang et al., 2023): heavy hitters and recent tokens.

    Each layer and KV head keeps the `recent` newest tokens and, of the older ones, the `heavy` that have received most
    attention so far. While prompt and output fit into `budget`, nothing is forgotten.

    Attributes:
        heavy: tokens kept for the attention they have received; with 0, only the recent ones are.
        recent: newest tokens, always kept; at least 1, the token itself.

    Raises:
        ValueError: not such numbers.
    """

    heavy: int
    recent: int

    def __post_init__(self):
        object.__setattr__(self, "heavy", checks.integer("h2o.heavy", self.heavy, 0, 2**30))
        object.__setattr__(self, "recent", checks.integer("h2o.recent", self.recent, 1, 2**30))

    @classmethod
    def parse(cls, value: object) -> Self:
        """Returns `value` if it is a budget, or the one that "HEAVY,RECENT" or {"heavy": .., "recent": ..} names.

        Raises:
            ValueError: it is nothing of these.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and len(parts := value.split(",")) == 2 and all(map(str.isdecimal, parts)):
            return cls(*map(int, parts))
        if isinstance(value, dict) and value.keys() == {"heavy", "recent"}:
            return cls(**value)
        raise ValueError(
            'h2o must be H2O(heavy, recent), {"heavy": tokens, "recent": tokens} or "HEAVY,RECENT", such as '
            f'"128,128", got {value!r:.80}'
        )

    @property
    def budget(self) -> int:
        """Tokens kept in all."""
        return self.heavy + self.recent
