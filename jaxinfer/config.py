"""Frozen configurations and their validation. Imports no jax."""

import dataclasses
from typing import Any, Literal

from jaxinfer.kv_spec import GROUP, KVSpec

# Positions up to here are exact in float32; angles of RoPE are off by position * 2**-24 radians at most.
MAX_STREAM_LENGTH = 1 << 24


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Kinds: "linear" (position interpolation), "llama3" (Llama 3.1, wavelength dependent), "yarn" (Peng et al., 2023)
    and "factors" (explicit divisors of each frequency, as GGUF files store them).
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn: factor on cos and sin; None computes it from `factor`
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # yarn: round the ends of the ramp to whole dimensions
    factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a decoder, in Hugging Face words.

    `layer_windows[i]` is the sliding window of layer i in tokens, None for full attention; `layer_rope[i]` says
    whether layer i rotates its queries and keys (SmolLM3 leaves some layers without positions). The first
    `attention_sinks` tokens are seen from behind every window, see `streaming`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    layer_rope: tuple[bool, ...] = ()
    attention_sinks: int = 0

    def __post_init__(self):
        """Fills the per-layer tuples and checks every size.

        Raises:
            ValueError: a size is not positive, or two of them do not fit together.
        """
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)
        if not self.layer_rope:
            object.__setattr__(self, "layer_rope", (True,) * self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        for name in ("layer_windows", "layer_rope"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} must have {self.num_layers} entries, got {len(getattr(self, name))}")
        if any(window is not None and window < 1 for window in self.layer_windows):
            raise ValueError(f"sliding windows must be at least 1 token, got {self.layer_windows}")
        if self.attention_sinks and None in self.layer_windows:
            raise ValueError(f"attention_sinks need a sliding window in every layer, got {self.layer_windows}")

    def streaming(self, sinks: int, window: int) -> "ModelConfig":
        """Returns the model as StreamingLLM runs it (Xiao et al., 2023): without an end.

        Every layer sees the first `sinks` tokens and the `window` most recent ones, or those of its own window where
        that is smaller. Positions are those within what is seen: the query that looks at the sinks stands right
        behind the window, at position `sinks + window - 1` at most.

        Raises:
            ValueError: sinks and window together are longer than what the model was trained on.
        """
        if sinks + window > self.max_position_embeddings:
            raise ValueError(
                f"{sinks} sinks and a window of {window} are more than the {self.max_position_embeddings} tokens that "
                "the model was trained on; lower attention_window"
            )
        windows = tuple(min(window, own or window) for own in self.layer_windows)
        return dataclasses.replace(
            self, layer_windows=windows, attention_sinks=sinks, max_position_embeddings=MAX_STREAM_LENGTH
        )

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        D, F, H = self.hidden_size, self.intermediate_size, self.head_dim
        attention = D * H * (2 * self.num_heads + 2 * self.num_kv_heads)
        biases = self.qkv_bias * H * (self.num_heads + 2 * self.num_kv_heads) + self.o_bias * D
        biases += self.mlp_bias * (2 * F + D)
        norms = 2 * D + self.qk_norm * 2 * H
        embeddings = self.vocab_size * D * (1 if self.tie_word_embeddings else 2)
        return embeddings + D + self.num_layers * (attention + 3 * D * F + biases + norms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and policies of the engine.

    Attributes:
        max_num_seqs: rows that run at once.
        max_num_batched_tokens: most tokens of one step; a longer prompt is prefilled in chunks.
        max_model_len: longest request, prompt and output, in tokens; None takes the model's own limit.
        page_size: tokens of a KV page.
        num_pages: pages of the pool, the null page included; None fits them into `memory_fraction` of what is free.
        kv_dtype: precision of the KV cache: "auto" (the decoder's), "float32", "bfloat16", "float16", "float8" or
            "int8" (with a scale for each token and head), "int4" or "int2" (in KIVI's way, a page at a time, which
            must be a multiple of 32 tokens), or two of these as "K,V" for keys and values apart.
        memory_fraction: share of the device memory that is free after the weights, to be used for KV pages.
        policy: "fcfs" (first come, first served) or "priority" (lower value first, then arrival).
        decode_steps: most decode steps of one dispatch, taken only when no request waits.
        async_scheduling: enqueue step N+1 before the tokens of step N are read.
        prefix_cache: keep the pages of ended requests until their memory is needed, and let requests with the same
            first tokens share them; never changes a token.
        h2o: accept requests with `SamplingParams.h2o`, for which each place of a page takes 8 more bytes a layer and
            KV head; others pay nothing else.
        host_cache_bytes: host memory for pages that the device has had to give up, found like those on the device;
            0 is off.
        disk_cache_dir: folder for pages that host memory has had to give up; they outlive the process. None is off.
        disk_cache_bytes: most bytes of that folder.
        preemption: how a preempted request gets its pages back: "recompute", "swap" (from host memory, as far as they
            are there), or "auto", whichever the rates measured so far say is faster.
        seed: makes the random seeds of requests that have none repeatable; None draws them from the system.
        attention_implementation: name of a kernel, or None for the fastest that accepts the arguments.
        attention_window: StreamingLLM: every token sees the sinks and so many most recent tokens, itself included, and
            memory and time a token stop growing; None sees all. `max_model_len` may then be beyond the model's limit.
        attention_sinks: the first tokens of a text that every token sees beside its `attention_window`.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_dtype: str = "auto"
    memory_fraction: float = 0.5
    policy: Literal["fcfs", "priority"] = "fcfs"
    decode_steps: int = 4
    async_scheduling: bool = True
    prefix_cache: bool = True
    h2o: bool = False
    host_cache_bytes: int = 0
    disk_cache_dir: str | None = None
    disk_cache_bytes: int = 16 << 30
    preemption: Literal["auto", "recompute", "swap"] = "auto"
    seed: int | None = None
    attention_implementation: str | None = None
    attention_window: int | None = None
    attention_sinks: int = 0

    def __post_init__(self):
        """Checks every limit.

        Raises:
            ValueError: a limit is out of its range.
        """
        for name in ("max_num_seqs", "max_num_batched_tokens", "page_size", "decode_steps"):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "num_pages"):  # a prompt token and a new one; a page besides the null page
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 2):
                raise ValueError(f"{name} must be an integer of at least 2, or None, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every running request gets a token in a step"
            )
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must be in (0, 1], got {self.memory_fraction}")
        if self.kv_spec("float32").open and self.page_size % GROUP:
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r} quantizes a page at a time, so that page_size must be a multiple of "
                f"{GROUP}, such as 64, got {self.page_size}"
            )
        if self.h2o and self.kv_spec("float32").open:
            raise ValueError(
                f"h2o moves single tokens, which kv_dtype={self.kv_dtype!r} packs a page at a time: use float8, int8 or"
                " a precision without scales"
            )
        self._check_streaming()
        self._check_tiers()
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {self.policy!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(f"seed must be a non-negative integer or None, got {self.seed!r}")

    def _check_tiers(self) -> None:
        for name in ("host_cache_bytes", "disk_cache_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be a number of bytes, got {value!r}")
        if self.preemption not in ("auto", "recompute", "swap"):
            raise ValueError(f"preemption must be 'auto', 'recompute' or 'swap', got {self.preemption!r}")
        if self.host_cache_bytes and not self.prefix_cache:
            raise ValueError("host_cache_bytes needs prefix_cache=True: pages in host memory are found by its keys")
        if not self.host_cache_bytes and (self.disk_cache_dir is not None or self.preemption == "swap"):
            given = "disk_cache_dir" if self.disk_cache_dir is not None else "preemption='swap'"
            raise ValueError(f"{given} needs host_cache_bytes: pages leave the device for host memory")

    def kv_spec(self, dtype: Any) -> KVSpec:
        """Returns the precision of the KV cache of a decoder of this dtype (or name of one)."""
        return KVSpec.parse(self.kv_dtype, dtype)

    def seen_by(self, model: ModelConfig) -> ModelConfig:
        """Returns the model with the attention that `attention_window` and `attention_sinks` ask for.

        Raises:
            ValueError: see `ModelConfig.streaming`; or sinks would be seen before their page is packed.
        """
        if self.attention_window is None:
            return model
        model = model.streaming(self.attention_sinks, self.attention_window)
        shortest = min(window for window in model.layer_windows if window)
        if self.attention_sinks and shortest < self.page_size and self.kv_spec("float32").open:
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r} packs a page when it is full, and sinks are read from packed pages: a "
                f"window of {shortest} must be at least page_size={self.page_size}"
            )
        return model

    def _check_streaming(self) -> None:
        window, sinks = self.attention_window, self.attention_sinks
        if window is not None:
            _check_positive("attention_window", window)
        if not isinstance(sinks, int) or isinstance(sinks, bool) or sinks < 0:
            raise ValueError(f"attention_sinks must be a non-negative integer, got {sinks!r}")
        if sinks and window is None:
            raise ValueError(f"attention_sinks={sinks} needs attention_window, the recent tokens that are seen beside")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
