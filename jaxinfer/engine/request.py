"""A request: host state of one sequence on its way through the engine. Imports no jax."""

import dataclasses
import enum
import functools
import time
from collections.abc import Sequence

from jaxinfer.sampling.params import SamplingParams
from jaxinfer.sampling.result import Logprob
from jaxinfer.sampling.rows import takes_best


class FinishReason(enum.StrEnum):
    """Why a request ended, in OpenAI's words."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's limit
    ABORT = "abort"  # cancelled by the user


class Status(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass
class RequestMetrics:
    """Times of a request in seconds of `time.monotonic`; None where it has not got so far."""

    arrival: float = dataclasses.field(default_factory=time.monotonic)
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the cache when it was first scheduled


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence: its tokens, its parameters and what it holds.

    Tokens are counted so:

        [0, num_computed_tokens)            keys and values are in the cache, or an enqueued step writes them
        [num_computed_tokens, num_tokens)   still to be computed
        the last `num_in_flight` tokens     sampled by enqueued steps and not yet read: known to the device only

    Attributes:
        stop_token_ids: tokens that end the request; they are kept in the output.
        seed: 63-bit integer from which the row's random keys are made.
        max_tokens: most output tokens, already bounded by the model's length.
        bad_words: banned token sequences of two or more tokens, matched on the host.
        cache_salt: only requests of the same salt share cached pages; None is a salt of its own.
        source: the request this is a fork of, until its pages are shared: its tokens begin with ours.
        pages: pages held, in order of position; all but the last may be shared.
        page_keys: keys of the first full pages, as far as they have been needed.
        num_published_pages: of `pages`, those that have been offered to the prefix cache.
        num_pages_to_load: the pages after these that are on their way from the host tier; the request waits for them.
        slot: index of the request's state on the device while it runs.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    stop_token_ids: frozenset[int] = frozenset()
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    prompt: str | None = None
    cache_salt: str | None = None
    source: "Request | None" = None

    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    page_keys: list[bytes] = dataclasses.field(default_factory=list)
    num_published_pages: int = 0
    num_pages_to_load: int = 0
    slot: int | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    sort_key: tuple[int, int] = (0, 0)
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens that the host has read."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens and those in flight."""
        return self.num_known_tokens + self.num_in_flight

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens whose keys and values no step has been asked to write."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_tokens_to_sample(self) -> int:
        """Output tokens that may still be asked of the device."""
        return self.max_tokens - len(self.output_token_ids) - self.num_in_flight

    @functools.cached_property
    def takes_best(self) -> bool:
        """Whether it needs no sampler; see `rows.takes_best`."""
        return takes_best(self.params)

    @property
    def needs_host_mask(self) -> bool:
        """Whether the host must see every token before the next can be sampled."""
        return bool(self.bad_words)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.status is Status.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Returns the known tokens [start, stop) of prompt and output together."""
        split = self.num_prompt_tokens
        if stop <= split:
            return list(self.prompt_token_ids[start:stop])
        if start >= split:
            return self.output_token_ids[start - split : stop - split]
        return [*self.prompt_token_ids[start:], *self.output_token_ids[: stop - split]]

    def banned_next_tokens(self) -> list[int]:
        """Returns the tokens that would complete a bad word after the tokens so far."""
        tail = self.output_token_ids
        return [word[-1] for word in self.bad_words if tuple(tail[len(tail) - len(word) + 1 :]) == word[:-1]
                and len(tail) >= len(word) - 1]  # fmt: skip
