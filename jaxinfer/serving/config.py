"""What the operator of a server decides, apart from the engine's own limits."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Limits and policies of the server; times in seconds.

    Attributes:
        model_name: under which clients ask for the model.
        api_key: clients must send it as "Authorization: Bearer KEY"; None lets everybody in.
        cors_origins: web pages of these origins may call the server; "*" is all of them.
        max_queue: completions that may wait for a place in the engine; more are refused with 429.
        max_body_bytes: largest request body.
        body_timeout: for the headers, and again for the body, of a request to arrive.
        request_timeout: for an answer to be generated and read by the client.
        drain_timeout: for running answers to finish once the server is told to stop.
        step_timeout: a step of the engine that takes longer is taken for a hang, and the engine for dead.
    """

    model_name: str
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_body_bytes: int = 4 * 2**20
    body_timeout: float = 30.0
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    step_timeout: float = 300.0

    def __post_init__(self) -> None:
        """Checks every limit.

        Raises:
            ValueError: a limit is out of its range.
        """
        if not self.model_name:
            raise ValueError("model_name must not be empty")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError(
                "api_key must be printable ASCII, at least one character; leave it out to let everybody in"
            )
        if self.max_queue < 0:
            raise ValueError(f"max_queue must be 0 or more, got {self.max_queue}")
        for name in ("max_body_bytes", "body_timeout", "request_timeout", "drain_timeout", "step_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")
