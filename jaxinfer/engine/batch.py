"""Turns a scheduled step into device inputs: the only place that pads and makes index arrays.

Everything travels in two arrays, one int32 and one float32, since every argument of a jitted call costs time;
`StepBatch.unpack` takes them apart again inside the step.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax import lax

from jaxinfer.config import EngineConfig
from jaxinfer.engine.scheduler import ScheduledStep
from jaxinfer.model.batch import TokenBatch
from jaxinfer.sampling.sampler import SamplingRows, make_rows

FLOAT_FIELDS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
                "frequency_penalty")  # fmt: skip
INT_FIELDS = ("slots", "top_k", "positions", "min_positions", "needs_state", "active")


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Static sizes of a step; every distinct value is compiled once.

    `is_decode`: one token a row and a loop over several steps, instead of one ragged step.
    `takes_best`: every row takes its most probable token. The sampler, half of what there is to compile of a small
    model, is left out.
    """

    num_tokens: int  # T
    num_rows: int  # S
    pages_per_row: int  # M
    is_decode: bool
    takes_best: bool = False

    def ints(self) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of every part of the packed int32 array."""
        T, S, M = self.num_tokens, self.num_rows, self.pages_per_row
        shapes: dict[str, tuple[int, ...]] = {}
        shapes |= dict.fromkeys(("token_ids", "positions", "slot_mapping"), (T,))
        shapes |= {"page_indices": (S, M), "kv_lens": (S,), "cu_q_lens": (S + 1,), "num_decode_rows": ()}
        shapes |= {"logits_indices": (S,), "num_samples": (S,)}
        return shapes | {f"sampling.{name}": (S,) for name in INT_FIELDS} | {"sampling.seeds": (S, 2)}

    def abstract_inputs(self, vocab_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns what the step takes from the host: packed int32 and float32 arrays and the token mask."""
        size = sum(math.prod(part) for part in self.ints().values())
        return (
            jax.ShapeDtypeStruct((size,), np.int32),
            jax.ShapeDtypeStruct((len(FLOAT_FIELDS), self.num_rows), np.float32),
            jax.ShapeDtypeStruct((self.num_rows, -(-vocab_size // 32)), np.uint32),
        )


@dataclasses.dataclass(frozen=True)
class StepBatch:
    """A step as the device sees it."""

    tokens: TokenBatch
    sampling: SamplingRows
    logits_indices: jax.Array  # i32[S]  token whose hidden state is sampled from
    num_samples: jax.Array  # i32[S]  tokens to sample, 0 for rows that do not reach their last token

    @classmethod
    def unpack(cls, ints: jax.Array, floats: jax.Array, shape: BatchShape) -> "StepBatch":
        """Returns the batch that `build_batch` packed; called inside jit."""
        parts: dict[str, jax.Array] = {}
        offset = 0
        for name, part_shape in shape.ints().items():
            size = math.prod(part_shape)
            parts[name] = lax.slice_in_dim(ints, offset, offset + size).reshape(part_shape)
            offset += size
        sampling = {name: parts[f"sampling.{name}"] for name in INT_FIELDS}
        sampling |= {name: sampling[name] > 0 for name in ("needs_state", "active")}
        sampling |= {name: floats[i] for i, name in enumerate(FLOAT_FIELDS)}
        seeds = lax.bitcast_convert_type(parts["sampling.seeds"], np.uint32)
        return cls(
            TokenBatch(
                **{field.name: parts[field.name] for field in dataclasses.fields(TokenBatch) if field.name in parts},
                slots=sampling["slots"],
            ),
            SamplingRows(**sampling, seeds=seeds),
            parts["logits_indices"],
            parts["num_samples"],
        )


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The sizes to which steps are padded."""

    decode_rows: tuple[int, ...]
    ragged_tokens: tuple[int, ...]
    ragged_rows: tuple[int, ...]
    pages_per_row: int

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int, min_decode_rows: int = 1) -> "Buckets":
        """Returns powers of two up to the engine's limits, and from 128 tokens on the values half way between."""
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        ragged = {16 << i for i in range(32)} | {192 << i for i in range(32)}
        return cls(
            decode_rows=_ladder({1 << i for i in range(32) if 1 << i >= min_decode_rows}, max(seqs, min_decode_rows)),
            ragged_tokens=_ladder(ragged, tokens),
            ragged_rows=_ladder({8}, seqs),
            pages_per_row=-(-max_model_len // config.page_size),
        )

    def all(self) -> list[BatchShape]:
        """Returns every shape that can occur, each with the sampler, those of a first request first."""
        decode = [BatchShape(rows, rows, self.pages_per_row, True) for rows in self.decode_rows]
        ragged = [
            BatchShape(tokens, rows, self.pages_per_row, False)
            for rows in self.ragged_rows
            for tokens in self.ragged_tokens
        ]
        return decode + ragged

    def shape_for(self, step: ScheduledStep) -> BatchShape:
        """Returns the smallest shape that holds the step."""
        rows = len(step.rows)
        return self.decode(rows) if step.is_decode else self.ragged(step.num_tokens, rows)

    def decode(self, num_rows: int) -> BatchShape:
        """Returns the shape of decode steps of so many rows."""
        size = _round_up(num_rows, self.decode_rows)
        return BatchShape(size, size, self.pages_per_row, True)

    def ragged(self, num_tokens: int, num_rows: int) -> BatchShape:
        """Returns the shape of a ragged step of so many tokens in so many rows."""
        tokens, rows = _round_up(num_tokens, self.ragged_tokens), _round_up(num_rows, self.ragged_rows)
        return BatchShape(tokens, rows, self.pages_per_row, False)


def build_batch(step: ScheduledStep, shape: BatchShape, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed int32 and float32 arrays of a step.

    A token whose id the host has not read yet is -1: the device takes the row's last sampled token.
    """
    parts = {name: np.zeros(size, np.int32) for name, size in shape.ints().items()}
    parts["num_decode_rows"][...] = step.num_decode_rows
    end = 0
    for s, row in enumerate(step.rows):
        request, start, stop = row.request, row.start, row.start + row.num_tokens
        begin, end = end, end + row.num_tokens
        pages = np.asarray(request.pages, np.int32)
        positions = np.arange(start, stop, dtype=np.int32)
        parts["positions"][begin:end] = positions
        parts["slot_mapping"][begin:end] = pages[positions // page_size] * page_size + positions % page_size
        known = request.token_ids(start, stop)
        parts["token_ids"][begin:end] = known if len(known) == row.num_tokens else -1
        parts["page_indices"][s, : len(pages)] = pages
        parts["kv_lens"][s] = stop
        parts["cu_q_lens"][s + 1] = end
        parts["logits_indices"][s] = end - 1
        parts["num_samples"][s] = row.num_samples
    parts["cu_q_lens"][len(step.rows) + 1 :] = end
    floats = _fill_sampling(parts, step, shape.num_rows)
    return np.concatenate([part.ravel() for part in parts.values()]), floats


def _fill_sampling(parts: Mapping[str, np.ndarray], step: ScheduledStep, num_rows: int) -> np.ndarray:
    requests = [row.request for row in step.rows]
    rows = make_rows(
        [request.params for request in requests],
        slots=[request.slot or 0 for request in requests],
        seeds=[request.seed for request in requests],
        positions=[row.start + row.num_tokens for row in step.rows],
        prompt_lens=[request.num_prompt_tokens for request in requests],
        num_rows=num_rows,
    )
    for name in INT_FIELDS:
        parts[f"sampling.{name}"][:] = getattr(rows, name)
    parts["sampling.active"][:] = parts["num_samples"] > 0
    parts["sampling.seeds"][:] = np.asarray(rows.seeds).view(np.int32)
    return np.stack([np.asarray(getattr(rows, name)) for name in FLOAT_FIELDS])


def _ladder(sizes: set[int], limit: int) -> tuple[int, ...]:
    return tuple(sorted({size for size in sizes if size < limit} | {limit}))


def _round_up(size: int, ladder: tuple[int, ...]) -> int:
    return next(step for step in ladder if step >= size)
