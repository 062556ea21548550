"""Makes tests/golden/beam_search.json: what beam search of transformers finds with tests/golden/models/tiny-chat.

Run it in the environment of make_golden.py: python scripts/make_golden_beam.py
"""

import json

import numpy as np
import torch
from make_golden import MODELS
from transformers import AutoModelForCausalLM

PATH = MODELS.parent / "beam_search.json"
MAX_TOKENS = 10
MIN_MARGIN = 1e-3  # between the scores of a case: float32 rounding must not change an order
SEARCHES = (
    {"beam_width": 2, "length_penalty": 1.0, "early_stopping": False},
    {"beam_width": 4, "length_penalty": 1.0, "early_stopping": True},
    {"beam_width": 4, "length_penalty": 1.0, "early_stopping": False},
    {"beam_width": 4, "length_penalty": -1.0, "early_stopping": False},
    {"beam_width": 4, "length_penalty": 1.5, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": 0.0, "early_stopping": "never"},
)


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-chat", dtype=torch.float32).eval()
    random = np.random.default_rng(0)
    cases = []
    for i, search in enumerate(SEARCHES):
        prompt = random.integers(3, 320, 7 + 3 * i).tolist()
        plain, _ = run(model, prompt, search, [])
        # Tokens of the continuations found end some of them in a second search, at different lengths.
        stops = sorted({sequence[-5 + j % 4] for j, sequence in enumerate(plain)})[:3]
        for stop_token_ids in ([], stops):
            sequences, scores = run(model, prompt, search, stop_token_ids)
            if np.abs(np.diff(scores)).min(initial=1) < MIN_MARGIN:
                raise SystemExit(f"{search}: two scores are too close: {scores}; choose another prompt")
            params = search | {"max_tokens": MAX_TOKENS, "ignore_eos": True, "stop_token_ids": stop_token_ids}
            name = f"{i}-{'stops' if stop_token_ids else 'plain'}"
            cases.append({"name": name, "prompt": prompt, "params": params, "sequences": sequences, "scores": scores})
            print(name, [len(sequence) for sequence in sequences])
    PATH.write_text(json.dumps({"cases": cases}, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")


def run(model, prompt: list[int], search: dict, stop_token_ids: list[int]) -> tuple[list[list[int]], list[float]]:
    """Returns the continuations, without padding, and their scores."""
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
        num_beams=search["beam_width"], num_return_sequences=search["beam_width"], max_new_tokens=MAX_TOKENS,
        length_penalty=search["length_penalty"], early_stopping=search["early_stopping"],
        eos_token_id=stop_token_ids or None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    sequences = []
    for tokens in out.sequences[:, len(prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop_token_ids), MAX_TOKENS)
        sequences.append(tokens[:end])
    return sequences, [round(score, 5) for score in out.sequences_scores.tolist()]


if __name__ == "__main__":
    main()
