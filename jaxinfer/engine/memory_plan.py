"""How weights, workspace and KV pages would share the memory of a device, from what the engine itself plans with."""

import dataclasses

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.memory import plan_pages, workspace_bytes
from jaxinfer.kv_spec import KVSpec


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The parts of a device's memory, in bytes, and what they hold.

    Attributes:
        memory: what jax may use of the device.
        weights: as they lie there.
        workspace: upper estimate of a step's temporary memory.
        open_pages: pages in full precision, one a row, where full ones are packed (int4, int2).
        kv_pages: the pool.
        num_pages: its pages, the null page included.
        page_size: tokens of a page.
        max_num_seqs: rows that run at once.
        max_model_len: longest request in tokens.
        bytes_per_token: of a full page, scales included.
    """

    memory: int
    weights: int
    workspace: int
    open_pages: int
    kv_pages: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    bytes_per_token: float

    @property
    def left(self) -> int:
        """What is for nothing of these."""
        return self.memory - self.weights - self.workspace - self.open_pages - self.kv_pages

    @property
    def num_tokens(self) -> int:
        """Tokens that the pages hold."""
        return (self.num_pages - 1) * self.page_size

    def num_requests(self, length: int) -> int:
        """Returns how many requests of `length` tokens, prompt and output, run at once without sharing any page."""
        return min(self.max_num_seqs, (self.num_pages - 1) // -(-length // self.page_size))


def plan_memory(
    model: ModelConfig, config: EngineConfig, kv: KVSpec, *, weights: int, memory: int, is_cpu: bool
) -> MemoryPlan:
    """Returns what an engine that starts on such a device would do.

    Args:
        model: shape of the model.
        config: limits.
        kv: precision of keys and values.
        weights: their bytes.
        memory: bytes that jax may use.
        is_cpu: whether the memory is that of a host, of which the engine takes less.

    Raises:
        ValueError: the weights do not fit, or see `plan_pages`.
    """
    if weights >= memory:
        raise ValueError(
            f"the weights do not fit: they take {weights / 2**30:.2f} GiB and the memory is {memory / 2**30:.2f} GiB, "
            f"{(weights - memory) / 2**30:.2f} GiB too little even without a KV cache"
        )
    num_pages, max_model_len = plan_pages(model, config, kv, memory - weights, is_cpu)
    page_bytes = kv.page_bytes(model, config.page_size)
    return MemoryPlan(
        memory=memory, weights=weights, workspace=workspace_bytes(model, config),
        open_pages=(1 + config.max_num_seqs) * kv.open_bytes(model, config.page_size),
        kv_pages=num_pages * page_bytes, num_pages=num_pages, page_size=config.page_size,
        max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, bytes_per_token=page_bytes / config.page_size,
    )  # fmt: skip


def least_memory(model: ModelConfig, config: EngineConfig, kv: KVSpec, weights: int) -> int:
    """Returns the bytes with which one request of `max_model_len` tokens fits beside the null page."""
    length = config.max_model_len or 2
    pages = 1 + -(-length // config.page_size)
    cache = pages * kv.page_bytes(model, config.page_size)
    cache += (1 + config.max_num_seqs) * kv.open_bytes(model, config.page_size)
    return weights + workspace_bytes(model, config) + -int(-cache // config.memory_fraction)
