"""What the runner keeps for requests that forget (H2O), apart from the state of all other steps."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.engine.compaction import Compaction
from jaxinfer.engine.page_pool import NULL_PAGE
from jaxinfer.engine.state import EngineState, zeros_like_on_demand
from jaxinfer.model.kv_cache import KeyLog
from jaxinfer.sampling.h2o import H2O


class KeyLogs:
    """The logs of all layers, and the operation that forgets most of a prompt.

    They are lent to the steps that need them, so that the others are compiled and run as if there were none.
    """

    def __init__(self, config: ModelConfig, num_pages: int, page_size: int):
        """Allocates the logs of `num_pages` pages."""
        self.layers = zeros_like_on_demand(jax.eval_shape(functools.partial(KeyLog.init, config, num_pages, page_size)))
        self._page_size = page_size
        self._compact_layer: Any = None

    def put_into(self, state: EngineState) -> EngineState:
        """Returns the state with the logs."""
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, key_logs=self.layers))

    def taken_from(self, state: EngineState) -> EngineState:
        """Takes the logs back from a state and returns it without them."""
        assert state.cache.key_logs is not None
        self.layers = state.cache.key_logs
        return dataclasses.replace(state, cache=dataclasses.replace(state.cache, key_logs=None))

    def compact(self, state: EngineState, done: Compaction) -> EngineState:
        """Moves what a request keeps into the first of its pages, layer by layer: one small program for all of them."""
        size = 1 << (len(done.pages) - 1).bit_length()
        pages = np.full(size, NULL_PAGE, np.int32)
        pages[: len(done.pages)] = done.pages
        numbers = [np.int32(number) for number in (done.num_tokens, done.h2o.heavy, done.h2o.recent)]
        cache, layers = state.cache, []
        for k, v, log in zip(cache.k_pages, cache.v_pages, self.layers):
            layers.append(self._compacted()((k, v), log, pages, *numbers))
        k_pages, v_pages = zip(*(layer for layer, _ in layers))
        self.layers = tuple(log for _, log in layers)
        return dataclasses.replace(state, cache=dataclasses.replace(cache, k_pages=k_pages, v_pages=v_pages))

    def warmup(self, state: EngineState, pages_per_row: int) -> EngineState:
        """Compiles the operation for every number of pages; returns the state as it was, but for the null page."""
        for size in (1 << i for i in range((pages_per_row - 1).bit_length() + 1)):
            state = self.compact(state, Compaction((NULL_PAGE,) * size, 2, H2O(0, 1)))
        return state

    def _compacted(self) -> Any:
        if self._compact_layer is None:
            from jaxinfer.model.heavy_hitters import compact_layer  # with the kernels' modules, which take a while

            self._compact_layer = jax.jit(compact_layer, donate_argnums=(0, 1))
        return self._compact_layer
