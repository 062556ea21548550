"""Shapes of well-known models, for plans and compile checks without their files. Imports no jax.

From the models' config.json on their pages; only what decides shapes and work.
"""

from jaxinfer.config import ModelConfig, RopeScaling

_LLAMA3_ROPE = RopeScaling("llama3", 8.0, 8192, 1.0, 4.0)


def _llama3(D: int, F: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig("llama", 128256, D, F, layers, heads, 8, 128, 131072, 1e-5, 5e5, _LLAMA3_ROPE)


def _qwen3(D: int, F: int, layers: int, heads: int, tied: bool = False) -> ModelConfig:
    return ModelConfig(
        "qwen3", 151936, D, F, layers, heads, 8, 128, 40960, 1e-6, 1e6, tie_word_embeddings=tied, qk_norm=True
    )


MODEL_SHAPES = {
    "llama-2-7b": ModelConfig("llama", 32000, 4096, 11008, 32, 32, 32, 128, 4096, 1e-5, 1e4),
    "llama-2-70b": ModelConfig("llama", 32000, 8192, 28672, 80, 64, 8, 128, 4096, 1e-5, 1e4),
    "llama-3-8b": _llama3(4096, 14336, 32, 32),
    "llama-3-70b": _llama3(8192, 28672, 80, 64),
    "llama-3-405b": _llama3(16384, 53248, 126, 128),
    "mistral-7b": ModelConfig("mistral", 32768, 4096, 14336, 32, 32, 8, 128, 32768, 1e-5, 1e6),
    "qwen2.5-7b": ModelConfig("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, 1e-6, 1e6, qkv_bias=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, 1e5, tie_word_embeddings=True
    ),
}  # fmt: skip
