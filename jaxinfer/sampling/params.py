"""`SamplingParams`: what a user asks of one request; names and ranges as in vLLM; no jax."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from jaxinfer.sampling import checks
from jaxinfer.sampling.h2o import H2O
from jaxinfer.sampling.structured import StructuredOutputs

MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Checked, normalised to hashable values, immutable.

    Processors apply in the order of Hugging Face: penalties, `logit_bias`, `allowed_token_ids` and
    `bad_words`, `min_tokens`, temperature, `top_k`, `top_p`, `min_p`, `typical_p`, each on the distribution
    left by the one before. If `min_tokens` would leave no token, those that end the request stay allowed.

    Attributes:
        n: Number of completions of the prompt.
        best_of: Number of completions that are sampled, of which the `n` with the highest sum of log-probabilities are
            returned; at least `n`. None is `n`.
        temperature: 0 is greedy; otherwise at least 1e-5.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        top_p: Keep the fewest most probable tokens with at least this mass; in (0, 1].
        min_p: Keep tokens at least this fraction as probable as the most probable one; in [0, 1].
        typical_p: Keep the tokens nearest to the entropy with at least this mass; in (0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output;
            in [0.01, 100].
        presence_penalty: Subtracted once from tokens in the output; [-2, 2].
        frequency_penalty: Subtracted per occurrence in the output; [-2, 2].
        logit_bias: Token id -> bias in [-100, 100] added to its logit. Stored as sorted (id, bias) pairs.
        seed: In [0, 2**63); None lets the engine draw one.
        max_tokens: Most output tokens. 256, not vLLM's 16, which cuts off answers, and not None (up to the
            model's length), which lets a model that never stops run for minutes; pass None to ask for that.
        min_tokens: No end-of-sequence or stop token before this many output tokens.
        stop: A str or several; generation ends where one appears in the text. Stored as a tuple.
        stop_token_ids: Tokens that end generation, besides the model's own end-of-sequence tokens.
        ignore_eos: Go on past the model's own end-of-sequence tokens.
        include_stop_str_in_output: Leave the stop string at the end of the text.
        skip_special_tokens: Leave special tokens out of the text.
        bad_words: Strings that must not be generated.
        allowed_token_ids: Only these tokens may be generated; None allows all.
        structured_outputs: The form that the text must have: a JSON schema, a regular expression, a choice or a grammar
            (`StructuredOutputs`, or a mapping of its names). The model's own end-of-sequence token ends it.
        logprobs: Number of most probable alternatives reported per output token, 0 to 20; the sampled token's
            own log-probability is always among them. None reports nothing.
        prompt_logprobs: The same for the prompt's tokens.
        echo: Put the prompt in front of the text.
        h2o: Forget keys and values beyond this budget; None keeps all. Needs an engine with `h2o=True`.

    Raises:
        ValueError: A value of the wrong type or outside its range; the message names it.

    Example:
        >>> SamplingParams(temperature=0.7, top_p=0.9, stop="END").stop
        ('END',)
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: Sequence[str] = ()  # a str is a Sequence[str] to a type checker: both forms are declared by this
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    h2o: H2O | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # the one way to normalise a field of a frozen dataclass

        put("n", checks.integer("n", self.n, 1))
        put("temperature", checks.real("temperature", self.temperature, 0))
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}; use 0"
            )
        if self.best_of is not None:
            put("best_of", checks.integer("best_of", self.best_of, self.n))
            if self.best_of > self.n and not self.temperature:
                raise ValueError("best_of needs a temperature above 0: greedy completions of a prompt are all the same")
        put("top_k", checks.integer("top_k", self.top_k, -1, 2**31 - 1))
        for name in ("top_p", "typical_p"):
            put(name, checks.real(name, getattr(self, name), 0, 1))
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be greater than 0, got 0; for greedy decoding use temperature=0")
        put("min_p", checks.real("min_p", self.min_p, 0, 1))
        put("repetition_penalty", checks.real("repetition_penalty", self.repetition_penalty, 0.01, 100))
        for name in ("presence_penalty", "frequency_penalty"):
            put(name, checks.real(name, getattr(self, name), -2, 2))
        put("logit_bias", _bias_pairs(self.logit_bias))
        if self.seed is not None:
            put("seed", checks.integer("seed", self.seed, 0, 2**63 - 1))
        if self.max_tokens is not None:
            put("max_tokens", checks.integer("max_tokens", self.max_tokens, 1))
        put("min_tokens", checks.integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got min_tokens={self.min_tokens}, max_tokens={self.max_tokens}"
            )
        for name in ("stop", "bad_words"):
            put(name, checks.strings(name, getattr(self, name)))
        put("stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", checks.token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must name at least one token, got none; None allows all")
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputs.of(self.structured_outputs))
            if self.ignore_eos is True:
                raise ValueError("ignore_eos can not go with structured_outputs, whose text ends with that token")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"):
            put(name, checks.boolean(name, getattr(self, name)))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, checks.integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.h2o is not None:
            put("h2o", H2O.parse(self.h2o))

    @property
    def num_completions(self) -> int:
        """How many completions are generated."""
        return self.best_of or self.n

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Returns the parameters of a JSON-like mapping; `logit_bias` may have its ids as decimal strings.

        Raises:
            ValueError: An unknown name (with the nearest known one) or an invalid value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown sampling parameter {name!r}{hint}; valid names: {', '.join(known)}")
        values = dict(values)
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):  # the keys of a JSON object are always strings
            values["logit_bias"] = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in bias.items()}
        return cls(**values)  # pyright: ignore[reportArgumentType]  (__post_init__ checks every type)


def validate_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Checks every token id in `params` against the vocabulary.

    Raises:
        ValueError: An id of `logit_bias`, `allowed_token_ids` or `stop_token_ids` is not below `vocab_size`.
    """
    fields: dict[str, Iterable[int]] = {
        "logit_bias": dict(params.logit_bias or ()),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in fields.items():
        bad = [token_id for token_id in ids if token_id >= vocab_size]
        if bad:
            raise ValueError(f"{name} must hold ids below the vocabulary size {vocab_size}, got {bad}")


def _bias_pairs(value: object) -> tuple[tuple[int, float], ...] | None:
    """Returns a bias mapping, or pairs as stored (so that `dataclasses.replace` works), as sorted pairs."""
    if value is None:
        return None
    if not isinstance(value, Mapping | tuple) or any(
        isinstance(value, tuple) and not (isinstance(pair, tuple) and len(pair) == 2) for pair in value
    ):
        raise ValueError(f"logit_bias must map token ids to numbers, got {value!r} ({type(value).__name__})")
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple(
        sorted(
            (checks.integer("an id in logit_bias", k, 0), checks.real(f"logit_bias[{k}]", v, -100, 100))
            for k, v in pairs
        )
    )
