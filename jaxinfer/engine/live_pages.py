"""Which pages of a request later tokens can still see; the others it gives back while it runs. Imports no jax.

    positions   0 .. sinks          dead: given back          the window, and what is written next
    pages       [ sink pages ]      [ ............ ]          [ live | live | live | ... ]

The request's list of pages, and the page table of a step, leave the dead ones out. Places of keys in the table are
therefore positions less the tokens of dead pages, for all but the sinks; dead pages are whole, and behind the window of
whoever is computed, so that attention over the table is that over the text.
"""

import dataclasses

from jaxinfer.config import EngineConfig, ModelConfig


@dataclasses.dataclass(frozen=True)
class LivePages:
    """The rule for one model and configuration.

    Attributes:
        page_size: tokens of a page.
        window: most recent tokens that a token sees, itself included, in the layer that sees most; None: all.
        sinks: first tokens of the text that every token sees besides.
        step_tokens: most tokens of a row in one step.
    """

    page_size: int
    window: int | None = None
    sinks: int = 0
    step_tokens: int = 1

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> "LivePages":
        """Returns the rule for a model in an engine of this configuration.

        All layers share one page table, so that a single layer without a window keeps every page of every layer.
        """
        model = config.seen_by(model)
        windows = [window for window in model.layer_windows if window is not None]
        window = max(windows) if len(windows) == model.num_layers else None
        steps = max(config.max_num_batched_tokens, config.decode_steps)
        return cls(config.page_size, window, model.attention_sinks, steps)

    @property
    def num_sink_pages(self) -> int:
        """Pages that a request keeps for its sinks."""
        return -(-self.sinks // self.page_size)

    def num_dead(self, position: int) -> int:
        """Returns how many pages, counted from the sinks' on, no token at `position` or later sees."""
        if self.window is None:
            return 0
        first_seen = max(0, position - self.window + 1)
        return max(0, first_seen // self.page_size - self.num_sink_pages)

    def most(self, num_tokens: int) -> int:
        """Returns how many pages a request of so many tokens holds at once, at most.

        It keeps what its last computed token sees, which a fork may compute again, and has room for a whole step.
        """
        pages = -(-num_tokens // self.page_size)
        if self.window is None:
            return pages
        span = (self.window + self.step_tokens + self.page_size - 2) // self.page_size + 1  # however they lie in pages
        return min(pages, self.num_sink_pages + span)
