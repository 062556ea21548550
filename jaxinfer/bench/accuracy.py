"""How far a model in one mode is from the same model in another: perplexity and logits, over the engine's own steps.

Perplexity is exp(mean negative log-likelihood) over windows of equal length that do not overlap; the first token of a
window is given and not scored. Every window is one request: its keys and values are in the engine's pages, its prompt
is computed in chunks of `max_num_batched_tokens`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.admission import make_requests
from jaxinfer.engine.engine import Engine
from jaxinfer.loading import Model
from jaxinfer.model.decoder import Decoder, head_logits
from jaxinfer.sampling.params import SamplingParams

BLOCK = 64  # positions whose logits over the vocabulary exist at once

type Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """A model compared with a reference, over `positions` next tokens.

    Attributes:
        positions: how many next-token distributions were compared.
        reference_perplexity: of the reference.
        perplexity: of the model.
        top1: share of positions at which both hold the same token for the most probable.
        kl: mean Kullback-Leibler divergence of the model from the reference, in nats.
        cosine: mean cosine of the angle between the logits of both.
        min_cosine: the least of them.
        rms: root mean square of all differences of logits.
        max_error: the greatest difference of a logit.
    """

    positions: int
    reference_perplexity: float
    perplexity: float
    top1: float
    kl: float
    cosine: float
    min_cosine: float
    rms: float
    max_error: float

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity: 0.005 is half a percent worse."""
        return self.perplexity / self.reference_perplexity - 1


@dataclasses.dataclass(frozen=True)
class Passage:
    """Tokens, of which those from `first` on are scored, given all that stand before them."""

    token_ids: list[int]
    first: int = 1


def windows(token_ids: Sequence[int], length: int, limit: int) -> list[Passage]:
    """Cuts a text into passages of `length` tokens, as many as the text has and no more than `limit` tokens hold.

    Raises:
        ValueError: there is not one whole window.
    """
    count = min(len(token_ids), limit) // length
    if length < 2 or count < 1:
        raise ValueError(
            f"a window needs at least 2 tokens and one whole window of text: window={length}, the text has "
            f"{len(token_ids)} tokens, of which at most {limit} are used"
        )
    return [Passage(list(token_ids[i * length : (i + 1) * length])) for i in range(count)]


def hidden_states(engine: Engine, passages: Sequence[Passage], progress: Progress | None = None) -> list[np.ndarray]:
    """Returns f[n - first, D] of each passage: the states from which its scored tokens are predicted.

    Raises:
        ValueError: a passage is too long for the engine.
    """
    result = []
    for i, passage in enumerate(passages):
        hidden = _run(engine, passage.token_ids)
        result.append(hidden[passage.first - 1 : -1])
        if progress:
            progress(i + 1, len(passages))
    return result


def compare(
    reference: Model, reference_hidden: Sequence[np.ndarray], model: Model, hidden: Sequence[np.ndarray],
    passages: Sequence[Passage],
) -> Accuracy:  # fmt: skip
    """Returns how far `model` is from `reference`, given what `hidden_states` says of both for the passages."""
    targets = np.concatenate([passage.token_ids[passage.first :] for passage in passages]).astype(np.int32)
    a, b = np.concatenate(reference_hidden), np.concatenate(hidden)
    block = jax.jit(functools.partial(_compare_block, reference.decoder, model.decoder))
    columns: list[Any] = []
    for start in range(0, len(targets), BLOCK):
        parts = [x[start : start + BLOCK] for x in (a, b, targets)]
        used = len(parts[2])
        padded = [np.pad(x, [(0, BLOCK - used)] + [(0, 0)] * (x.ndim - 1)) for x in parts]
        columns.append([np.asarray(x)[:used] for x in block(reference.params, model.params, *padded)])
    nll_a, nll_b, same, kl, cosine, square, error = (np.concatenate(x).astype(np.float64) for x in zip(*columns))
    return Accuracy(
        positions=len(targets), reference_perplexity=math.exp(nll_a.mean()), perplexity=math.exp(nll_b.mean()),
        top1=float(same.mean()), kl=float(kl.mean()), cosine=float(cosine.mean()), min_cosine=float(cosine.min()),
        rms=math.sqrt(square.mean()), max_error=float(error.max()),
    )  # fmt: skip


def _run(engine: Engine, token_ids: list[int]) -> np.ndarray:
    """Returns the hidden states f[n, D] of all tokens, from the engine's scheduler and runner."""
    # To ask for log-probabilities of the prompt is to ask that every token be computed, in a ragged step.
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    scheduler, runner = engine.scheduler, engine.runner
    [request] = make_requests(
        engine.model, "passage", token_ids, params, 0, None, engine.max_model_len, np.random.default_rng(0)
    )
    scheduler.add(request)
    chunks = []
    while not request.is_finished:
        scheduled = scheduler.schedule()
        for admitted in scheduled.admitted:
            runner.install(admitted)
        output = runner.dispatch(scheduled).output
        hidden, [row] = np.asarray(output.hidden, np.float32), scheduled.rows
        chunks.append(hidden.reshape(-1, hidden.shape[-1])[: row.num_tokens])
        scheduler.update(scheduled, [np.asarray(output.token_ids)[: row.num_samples, 0].tolist()])
    hidden = np.concatenate(chunks)
    assert len(hidden) == len(token_ids), "a token of the passage was not computed"
    return hidden


def _compare_block(
    reference: Decoder, decoder: Decoder, reference_params: Any, params: Any, reference_hidden: jax.Array,
    hidden: jax.Array, targets: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Returns, for each position: both losses, same top token, KL, cosine, mean square and greatest difference."""
    a = head_logits(reference, reference_params, reference_hidden.astype(reference.dtype))
    b = head_logits(decoder, params, hidden.astype(decoder.dtype))
    log_a, log_b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    nll_a, nll_b = (-jnp.take_along_axis(x, targets[:, None], axis=1)[:, 0] for x in (log_a, log_b))
    cosine = (a * b).sum(1) / jnp.sqrt((a * a).sum(1) * (b * b).sum(1))
    kl = (jnp.exp(log_a) * (log_a - log_b)).sum(1)
    difference = a - b
    same = a.argmax(1) == b.argmax(1)
    return nll_a, nll_b, same, kl, cosine, (difference**2).mean(1), jnp.abs(difference).max(1)
