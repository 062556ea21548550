"""Which keys a query sees, in whole blocks and one by one; shared by the backends."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Index = Any  # int, or an i32 scalar that is traced


@dataclasses.dataclass(frozen=True)
class Visibility:
    """What position alone allows: query t of `num_q` stands at key position t + num_k - num_q.

    It sees the keys at or before its own position if `causal`, and of these the last `sliding_window`.
    """

    num_q: int
    num_k: int
    causal: bool
    sliding_window: int | None

    @property
    def offset(self) -> int:
        """Key position of query 0."""
        return self.num_k - self.num_q

    def keys_of(self, first_q: Index, last_q: Index) -> tuple[Index, Index]:
        """Returns (start, end) of the keys that some query in `first_q` ... `last_q` sees."""
        start, end = 0, self.num_k
        if self.causal:
            end = _clip(last_q + (self.offset + 1), self.num_k)
        if self.sliding_window is not None:
            start = _clip(first_q + (self.offset - self.sliding_window + 1), self.num_k)
        return start, end

    def queries_of(self, first_k: Index, last_k: Index) -> tuple[Index, Index]:
        """Returns (start, end) of the queries that see some key in `first_k` ... `last_k`."""
        start, end = 0, self.num_q
        if self.causal:
            start = _clip(first_k - self.offset, self.num_q)
        if self.sliding_window is not None:
            end = _clip(last_k + (self.sliding_window - self.offset), self.num_q)
        return start, end

    def key_blocks(self, q_block: Index, block_q: int, block_k: int) -> tuple[Index, Index]:
        """Returns (start, end) of the key blocks that query block `q_block` meets; end <= start if there is none."""
        first = q_block * block_q
        start, end = self.keys_of(first, first + (block_q - 1))
        return _div(start, block_k), _div(end + (block_k - 1), block_k)

    def query_blocks(self, k_block: Index, block_q: int, block_k: int) -> tuple[Index, Index]:
        """Returns (start, end) of the query blocks that key block `k_block` meets; end <= start if there is none."""
        first = k_block * block_k
        start, end = self.queries_of(first, first + (block_k - 1))
        return _div(start, block_q), _div(end + (block_q - 1), block_q)

    def sees_all(self, q_block: Index, k_block: Index, block_q: int, block_k: int) -> Any:
        """Whether every query of a block sees every key of a block, none of them padding."""
        first_q, first_k = q_block * block_q, k_block * block_k
        last_q, last_k = first_q + (block_q - 1), first_k + (block_k - 1)
        result = last_k < self.num_k
        if self.causal:
            result &= last_k <= first_q + self.offset
        if self.sliding_window is not None:
            result &= first_k > last_q + (self.offset - self.sliding_window)
        return result

    def mask(self, t: jax.Array, j: jax.Array) -> jax.Array:
        """Returns whether query `t` sees key `j` (i32 arrays that broadcast); no query sees a key past the last."""
        result = j < self.num_k
        if self.causal:
            result = result & (j <= t + self.offset)
        if self.sliding_window is not None:
            result = result & (j > t + (self.offset - self.sliding_window))
        return result

    @property
    def num_pairs(self) -> int:
        """Number of visible (query, key) pairs."""
        ranges = (self.keys_of(t, t) for t in range(self.num_q))
        return sum(max(0, end - start) for start, end in ranges)

    @property
    def some_queries_see_nothing(self) -> bool:
        """Whether position alone leaves queries without keys: the first T - S of a causal call."""
        return self.causal and self.offset < 0


def ever_seen(
    visibility: Visibility, q_segment_ids: Int[Array, "B T"] | None, kv_segment_ids: Int[Array, "B S"] | None
) -> jax.Array | None:
    """Returns bool[B | 1, S], False for keys that no query can see; None if every key may be seen."""
    start, _ = visibility.keys_of(0, 0)
    seen = None if start == 0 else jnp.arange(visibility.num_k, dtype=jnp.int32)[None] >= start
    if q_segment_ids is not None and kv_segment_ids is not None:
        present = jax.vmap(_is_in)(kv_segment_ids, q_segment_ids)
        seen = present if seen is None else seen & present
    return seen


def blank_unseen_keys(x: Float[Array, "B S K H"], seen: jax.Array | None) -> Float[Array, "B S K H"]:
    """Returns `x` with zeros for the keys that are not `seen`: a weight of 0 times NaN would be NaN."""
    return x if seen is None else jnp.where(seen[:, :, None, None], x, jnp.zeros_like(x))


def _is_in(x: jax.Array, values: jax.Array) -> jax.Array:
    """Returns whether each of `x` is among `values`; comparing all with all would take memory O(T * S) on a CPU."""
    values = jnp.sort(values)
    index = jnp.searchsorted(values, x, method="scan_unrolled")
    return values[jnp.minimum(index, values.shape[0] - 1)] == x


def _clip(x: Index, end: int) -> Index:
    return min(max(x, 0), end) if isinstance(x, int) else jnp.clip(x, 0, end)


def _div(x: Index, divisor: int) -> Index:
    """`x // divisor` for x >= 0 without the handling of signs."""
    return x // divisor if isinstance(x, int) else lax.div(x, jnp.int32(divisor))
