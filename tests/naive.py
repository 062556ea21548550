"""The oracle of the engine tests: one request at a time, every token from a full forward pass over all the text.

No paging that matters (one page holds the row), no batching, no state between steps: counts and masks are made
anew from the tokens so far. It shares the decoder and the sampler with the engine, which have oracles of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kv_spec import KVSpec
from jaxinfer.model.batch import TokenBatch
from jaxinfer.model.decoder import Decoder
from jaxinfer.model.kv_cache import KVCache
from jaxinfer.sampling.rows import build_row
from jaxinfer.sampling.sampler import make_rows, sample
from jaxinfer.sampling.state import SamplerState
from jaxinfer.tokenizer import IncrementalDetokenizer


class NaiveLoop:
    def __init__(self, model, max_len, kv_dtype="auto"):
        self.model = model
        self.max_len = max_len
        kv = KVSpec.parse(kv_dtype, jnp.dtype(model.decoder.dtype))
        decoder = Decoder(model.config, model.decoder.dtype, "reference")

        @jax.jit
        def next_token(params, token_ids, length, rows, state, token_mask):
            positions = jnp.arange(max_len, dtype=jnp.int32)
            batch = TokenBatch(
                token_ids, positions, positions + max_len, jnp.ones((1, 1), jnp.int32), length[None],
                jnp.stack([jnp.int32(0), length]), jnp.int32(0),
            )  # fmt: skip
            cache = KVCache.init(model.config, 2, max_len, kv)
            hidden, _ = decoder.apply({"params": params}, cache, batch)
            logits = decoder.apply({"params": params}, hidden[length - 1][None], method="logits")
            token, _, _ = sample(logits, rows, state, token_mask)
            return token[0], jax.nn.log_softmax(logits[0])

        self._next_token = next_token

    def run(self, prompt, params):
        """Returns output tokens, text, and the log-softmax at each output token."""
        model, V = self.model, self.model.config.vocab_size
        prompt = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        output, scores = [], []
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(model.tokenizer.eos_token_ids))
        words = [
            tuple(model.tokenizer.encode(s, add_special_tokens=False)) for w in params.bad_words for s in (w, " " + w)
        ]
        while len(output) < params.max_tokens:
            tokens = prompt + output
            row = build_row(
                params, prompt, output, model.tokenizer.eos_token_ids, [w[0] for w in words if len(w) == 1], V
            )
            mask = np.full((1, -(-V // 32)), 0xFFFFFFFF, np.uint32)
            for word in words:
                if len(word) > 1 and len(output) >= len(word) - 1 and tuple(output[-len(word) + 1 :]) == word[:-1]:
                    mask[0, word[-1] // 32] &= ~np.uint32(1 << word[-1] % 32)
            rows = make_rows(
                [params], slots=[0], seeds=[params.seed or 0], positions=[len(tokens)], prompt_lens=[len(prompt)]
            )
            state = SamplerState(*(jnp.asarray(x)[None] for x in row))
            padded = np.zeros(self.max_len, np.int32)
            padded[: len(tokens)] = tokens
            token, logprobs = self._next_token(model.params, padded, np.int32(len(tokens)), rows, state, mask)
            output.append(int(token))
            scores.append(np.asarray(logprobs))
            text = model.tokenizer.decode(output, skip_special_tokens=params.skip_special_tokens)
            searched = IncrementalDetokenizer(model.tokenizer, skip_special_tokens=params.skip_special_tokens)
            start = len(searched.push(output[: params.min_tokens]))  # stop strings count from here on
            ends = [text.find(s, start) + len(s) for s in params.stop if s in text[start:]]
            if ends:
                end = min(ends)
                stop = max((s for s in params.stop if text[:end].endswith(s)), key=len)
                return output, text[: end if params.include_stop_str_in_output else end - len(stop)], scores
            if output[-1] in stop_ids:
                break
        return output, model.tokenizer.decode(output, skip_special_tokens=params.skip_special_tokens), scores
