"""Makes tests/golden/models/: tiny random models of every decoder family, with logits by transformers.

Run in an environment with torch and transformers (5.24 made the committed files; jaxinfer needs neither):

    python scripts/make_golden.py              # every case
    python scripts/make_golden.py qwen2 qwen3  # only these

make_golden_gguf.py and make_golden_chat.py make the rest. Everything is seeded by the name of the case.
"""

import itertools
import json
import shutil
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

MODELS = Path(__file__).resolve().parent.parent / "tests" / "golden" / "models"
PROMPT_TOKENS = 48
GREEDY_TOKENS = 24
MIN_MARGIN = 0.03  # of a greedy step: f32 rounding in another order must not change a golden token
MIN_DISTINCT = 8  # greedy tokens: a continuation that repeats one token proves little
MIN_EFFECT = 0.02  # largest logit change when a norm or bias is forgotten

COMMON = {
    "vocab_size": 112,  # what the made-up tokenizer of the GGUF twins has
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(theta: float, kind: str = "default", **more: float | bool) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = {
    # head_dim 16 so that wavelengths fall below, between and above the two thresholds (8 and 32 positions)
    "head_dim": 16,
    **rope(
        10_000.0,
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
}
# A small theta spreads YaRN's ramp over several of the eight frequencies; 4 * 32 is max_position_embeddings.
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}

# name -> model type, what differs from COMMON. rms_norm_eps is large where noted, so that ignoring it shows.
CASES: dict[str, tuple[str, dict]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True, **rope(10_000.0)}),
    "llama-untied": ("llama", {"rms_norm_eps": 1e-2, **rope(500.0)}),
    "llama-mha-bias": (
        "llama",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-2,
            **rope(100.0),
        },
    ),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "head_dim": 12, **rope(10_000.0)}),
    "llama3-rope": ("llama", LLAMA3),
    "llama-linear-rope": ("llama", {"head_dim": 16, **rope(10_000.0, "linear", factor=4.0)}),
    "llama-yarn": ("llama", {"head_dim": 16, **rope(10.0, "yarn", **YARN)}),
    "llama-yarn-mscale": (
        "llama",
        {"head_dim": 16, **rope(10.0, "yarn", attention_factor=1.4, beta_fast=2.0, beta_slow=0.5, **YARN)},
    ),
    "llama-yarn-mscale-all-dim": (
        "llama",
        {"head_dim": 16, **rope(10.0, "yarn", mscale=2.0, mscale_all_dim=0.5, truncate=False, **YARN)},
    ),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-2, **rope(1_000.0)}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, **rope(1_000_000.0)}),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
            **rope(1_000.0),
        },
    ),
    "qwen2-yarn": (
        "qwen2",
        {"num_attention_heads": 2, "num_key_value_heads": 1, **rope(20.0, "yarn", **YARN)},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-2, **rope(1_000.0)}),
    "qwen3-untied": ("qwen3", {"head_dim": 16, **rope(1_000_000.0)}),
    "mistral": ("mistral", {"sliding_window": 8, **rope(10_000.0)}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 16, **rope(1_000.0)}),
    "smollm3": ("smollm3", {"num_hidden_layers": 3, "no_rope_layer_interval": 2, **rope(1_000.0)}),
}
# Same model and logits as the second name, stored in another way.
SHARDED = {"llama-sharded": "llama-untied"}
LEGACY = {"llama3-rope-legacy": "llama3-rope"}


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model whose logits have a standard deviation of 1 to 4 and depend on every parameter."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and name.endswith("bias"):
                parameter.copy_(noise * 0.5)
            elif parameter.ndim == 1:  # a norm's scale, well away from one
                parameter.copy_(0.4 + 1.6 * torch.rand(parameter.shape, generator=generator))
            else:  # embeddings are small, so that the layers outweigh the residual stream's first value
                parameter.copy_(noise * (1.5 / parameter.shape[1] ** 0.5))
    return model


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Logits float32 [T, V] of one sequence int32 [T], without a cache."""
    return model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0].numpy()


def golden(model: PreTrainedModel, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of golden.npz for one prompt: EOS is an ordinary token here."""
    logits = logits_of(model, token_ids)
    tokens, greedy, margins = token_ids, [], []
    for _ in range(GREEDY_TOKENS):
        last = logits_of(model, tokens)[-1]
        second, best = np.sort(last)[-2:]
        greedy.append(last.argmax())
        margins.append(best - second)
        tokens = np.append(tokens, greedy[-1])
    return {
        "token_ids": token_ids.astype(np.int32),
        "logits": logits.astype(np.float32),
        "greedy": np.array(greedy, np.int32),
        "greedy_margin": np.array(margins, np.float32),
    }


def robust_golden(model: PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
    """The first random prompt whose greedy continuation is varied and nowhere near a tie."""
    for attempt in itertools.count():
        rng = np.random.default_rng([seed, attempt])
        arrays = golden(model, rng.integers(model.config.vocab_size, size=PROMPT_TOKENS).astype(np.int32))
        if arrays["greedy_margin"].min() > MIN_MARGIN and len(set(arrays["greedy"].tolist())) >= MIN_DISTINCT:
            return arrays
        if attempt == 500:
            raise RuntimeError("no prompt of 500 has a robust greedy continuation: choose other weights")
    raise AssertionError("unreachable")


@torch.no_grad()
def check_sensitive(model: PreTrainedModel, arrays: dict[str, np.ndarray]) -> None:
    """Raises unless forgetting any single norm scale or bias changes some logit visibly."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            continue
        kept = parameter.clone()
        parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        change = np.abs(logits_of(model, arrays["token_ids"]) - arrays["logits"]).max()
        parameter.copy_(kept)
        if change < MIN_EFFECT:
            raise RuntimeError(f"forgetting {name} changes the logits by only {change:.1e}")


def use_legacy_rope(path: Path) -> None:
    """Rewrites config.json with the keys of transformers 4, which most published models have."""
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.45.0"
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def report(name: str, arrays: dict[str, np.ndarray]) -> None:
    size = sum(path.stat().st_size for path in (MODELS / name).iterdir())
    print(
        f"{name:28s} {size / 1024:5.0f} KiB  logits std {arrays['logits'].std():.2f}  "
        f"least margin {arrays['greedy_margin'].min():.3f}  {len(set(arrays['greedy'].tolist()))} distinct"
    )


def make_case(name: str) -> None:
    source = {**SHARDED, **LEGACY}.get(name, name)
    model_type, options = CASES[source]
    config = AutoConfig.for_model(model_type, **{**COMMON, **options})
    seed = zlib.crc32(source.encode())
    model = make_model(config, seed)
    arrays = robust_golden(model, seed)
    check_sensitive(model, arrays)

    directory = MODELS / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, max_shard_size="40KB" if name in SHARDED else "5GB")
    if name in LEGACY:
        use_legacy_rope(directory / "config.json")
    np.savez_compressed(directory / "golden.npz", **arrays)

    loaded = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    np.testing.assert_array_equal(logits_of(loaded, arrays["token_ids"]), arrays["logits"])
    report(name, arrays)


def main() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in sys.argv[1:] or [*CASES, *SHARDED, *LEGACY]:
        make_case(name)


if __name__ == "__main__":
    main()
