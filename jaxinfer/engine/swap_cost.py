"""Whether a preempted request's pages are moved or computed again: bytes against tokens. Imports no jax."""

LATENCY = 2e-3  # seconds until moved pages are there, beside their bytes: they are looked for once a step
SMOOTHING = 0.9  # share of the old estimate that a new measurement leaves


class SwapCost:
    """Rates of this machine; until both are known, moving counts as cheaper."""

    def __init__(self, bytes_per_s: float | None = None, tokens_per_s: float | None = None):
        """Starts from given rates.

        Args:
            bytes_per_s: from host memory into the pages of the device.
            tokens_per_s: computed by steps that compute prompts; None as long as there was none.
        """
        self.bytes_per_s = bytes_per_s
        self.tokens_per_s = tokens_per_s

    def is_swap_cheaper(self, num_bytes: int, num_tokens: int) -> bool:
        """Returns whether so many bytes come from the host sooner than so many tokens are computed."""
        if self.bytes_per_s is None or self.tokens_per_s is None:
            return True
        return LATENCY + num_bytes / self.bytes_per_s < num_tokens / self.tokens_per_s

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Takes the measurement of a step."""
        rate, old = num_tokens / seconds, self.tokens_per_s
        self.tokens_per_s = rate if old is None else SMOOTHING * old + (1 - SMOOTHING) * rate
