"""Memory: how many KV pages fit into what the device says is free, and giving back what is not needed."""

import contextlib
import ctypes
import os
from pathlib import Path

import jax

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.kv_spec import KVSpec

CPU_CACHE_LIMIT = 1 << 30  # bytes taken by default on a machine whose memory is shared with everything else


def free_memory(device: jax.Device) -> int:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the bytes that are free on the device, or in the host's memory for a CPU device."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def workspace_bytes(model: ModelConfig, config: EngineConfig) -> int:
    """Returns an upper estimate of a step's temporary memory, in f32: activations of a layer, logits of all rows."""
    widest = 2 * model.intermediate_size + 4 * model.hidden_size + 2 * model.num_heads * model.head_dim
    logits = 4 * config.max_num_seqs * model.vocab_size * 4
    return config.max_num_batched_tokens * widest * 4 + logits


def plan_pages(model: ModelConfig, config: EngineConfig, kv: KVSpec, free: int, is_cpu: bool) -> tuple[int, int]:
    """Returns the number of pages, the null page included, and the longest request in tokens.

    Unless `num_pages` is given, never more pages than `max_num_seqs` requests of full length could use. Without
    `max_model_len` the length is the model's own, or what the pages can hold where that is less.

    Args:
        model: shape of the model.
        config: limits.
        kv: precision of keys and values.
        free: bytes free after the weights are loaded.
        is_cpu: whether memory is shared with the rest of the machine.

    Raises:
        ValueError: the pages cannot hold one request of `max_model_len` tokens, or that is more than the model's limit.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {limit} tokens")
    wanted = config.max_model_len or limit
    num_pages = config.num_pages
    if num_pages is None:
        page_bytes = kv.page_bytes(model, config.page_size)
        budget = int((free - workspace_bytes(model, config)) * config.memory_fraction)
        open_bytes = (1 + config.max_num_seqs) * kv.open_bytes(model, config.page_size)
        if is_cpu:
            budget = min(budget, CPU_CACHE_LIMIT + open_bytes)
        budget -= open_bytes
        full = 1 + config.max_num_seqs * -(-wanted // config.page_size)
        num_pages = min(full, budget // page_bytes)
        if num_pages < 2:
            raise ValueError(
                f"no room for KV pages: {free / 2**20:.0f} MiB are free, one page of {config.page_size} tokens takes "
                f"{page_bytes / 2**20:.1f} MiB beside a workspace of "
                f"{workspace_bytes(model, config) / 2**20:.0f} MiB; lower max_num_batched_tokens or max_num_seqs, "
                "or set num_pages or a smaller kv_dtype"
            )
    capacity = (num_pages - 1) * config.page_size
    if config.max_model_len is not None and capacity < config.max_model_len:
        raise ValueError(
            f"the KV cache is too small for one request: {num_pages} pages hold {capacity} tokens, "
            f"max_model_len is {config.max_model_len}; raise num_pages or memory_fraction, or lower max_model_len"
        )
    if capacity < 2:
        raise ValueError(
            f"the KV cache is too small for any request: {num_pages} pages hold {capacity} tokens, and a prompt with "
            "one new token needs at least 2; raise num_pages or page_size"
        )
    return num_pages, min(wanted, capacity)


def trim_heap() -> None:
    """Gives memory that has been freed back to the system: compiling or reading programs leaves tens of MiB of it."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # a system whose C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)
