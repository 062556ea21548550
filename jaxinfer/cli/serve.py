"""`jaxinfer serve`: an OpenAI-compatible server."""

import ipaddress
import time
from pathlib import Path
from typing import Any

import click

from jaxinfer import __version__
from jaxinfer.cli.options import DEFAULT_MODEL, find_model, weight_options
from jaxinfer.cli.output import notice
from jaxinfer.cli.sizes import SIZE


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@weight_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all of them.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--api-key", envvar="JAXINFER_API_KEY", help="Clients must send it; better given as $JAXINFER_API_KEY.")
@click.option("--served-model-name", "model_name", help="Name that clients use; by default MODEL's last part.")
@click.option(
    "--cors-origin", "cors_origins", multiple=True, help="Web pages of this origin may call; may be repeated."
)
@click.option("--max-model-len", type=int, help="Tokens of prompt and answer; by default the model's limit.")
@click.option("--max-num-seqs", type=int, default=16, show_default=True, help="Completions that run at once.")
@click.option("--max-num-batched-tokens", type=int, default=512, show_default=True, help="Tokens of one step.")
@click.option("--memory-fraction", type=float, default=0.5, show_default=True, help="Of free memory, for the KV cache.")
@click.option(
    "--host-cache",
    type=SIZE,
    default="0",
    show_default=True,
    help="Host memory for KV pages that the device has given up, such as 4GB; they come back when asked for.",
)
@click.option(
    "--disk-cache-dir",
    type=click.Path(file_okay=False),
    help="Folder for KV pages that host memory has given up; they outlive the server.",
)
@click.option("--disk-cache", type=SIZE, default="16GB", show_default=True, help="Most bytes of that folder.")
@click.option(
    "--preemption",
    type=click.Choice(["auto", "recompute", "swap"]),
    default="auto",
    show_default=True,
    help="How a preempted completion gets its KV pages back; swap is from the host cache.",
)
@click.option(
    "--policy",
    type=click.Choice(["fcfs", "priority"]),
    default="fcfs",
    show_default=True,
    help="Whether requests may have a priority.",
)
@click.option("--h2o", is_flag=True, help="Accept requests that forget keys and values beyond a budget.")
@click.option("--max-queue", type=int, default=256, show_default=True, help="Completions that may wait; then 429.")
@click.option("--max-body-mib", type=float, default=4, show_default=True, help="Largest request body.")
@click.option("--request-timeout", type=float, default=600, show_default=True, help="Seconds an answer may take.")
@click.option(
    "--drain-timeout",
    type=float,
    default=30,
    show_default=True,
    help="Seconds running answers may still take after SIGTERM.",
)
@click.option(
    "--step-timeout",
    type=float,
    default=300,
    show_default=True,
    help="Seconds after which a step of the engine is taken for a hang.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def serve(
    model: str, dtype: str | None, quantize: str | None, activations: str | None, kv_dtype: str,
    attention_window: int | None, attention_sinks: int,
    host: str, port: int, log_level: str, max_body_mib: float, max_model_len: int | None, max_num_seqs: int,
    max_num_batched_tokens: int, memory_fraction: float, policy: Any, h2o: bool, model_name: str | None,
    api_key: str | None, host_cache: int, disk_cache_dir: str | None, disk_cache: int, preemption: Any, **limits: Any,
) -> None:  # fmt: skip
    """Serve MODEL to OpenAI clients: completions, chats, streams, metrics.

    SIGTERM or Ctrl-C lets running answers finish; a second one does not.
    """
    from jaxinfer.config import EngineConfig
    from jaxinfer.kv_spec import KVSpec
    from jaxinfer.serving.config import ServerConfig

    engine_config = EngineConfig(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        memory_fraction=memory_fraction, policy=policy, kv_dtype=kv_dtype, attention_window=attention_window,
        attention_sinks=attention_sinks, h2o=h2o, page_size=KVSpec.parse(kv_dtype, "float32").page_size,
        host_cache_bytes=host_cache, disk_cache_dir=disk_cache_dir, disk_cache_bytes=disk_cache, preemption=preemption,
    )  # fmt: skip
    config = ServerConfig(
        model_name=model_name or Path(model).name, api_key=api_key, max_body_bytes=int(max_body_mib * 2**20), **limits
    )
    from jaxinfer.serving.listener import bind, url_of

    with bind(host, port) as listener:  # before anything slow: a port in use is known at once
        if api_key is None and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
            notice("everybody who reaches this machine may use the server: set an API key")
        server = _prepare(find_model(model), (dtype, quantize, activations), engine_config, config, log_level)
        click.echo(f"{config.model_name} is served at {url_of(listener)}/v1", err=True)
        server.run(sockets=[listener])


def _prepare(path: Path, weights: tuple, engine_config: Any, config: Any, log_level: str) -> Any:
    """Loads and compiles everything, so that no request has to wait for it, and returns the server."""
    from jaxinfer.cli.progress import byte_progress, spinner
    from jaxinfer.compile_cache import default_program_cache
    from jaxinfer.engine.async_engine import AsyncEngine
    from jaxinfer.engine.engine import Engine
    from jaxinfer.loading import load
    from jaxinfer.serving.app import create_app
    from jaxinfer.serving.frontend import Frontend
    from jaxinfer.serving.logs import configure_logs
    from jaxinfer.serving.server import Server

    configure_logs(log_level)
    began = time.monotonic()
    with byte_progress("Loading weights") as progress:
        dtype, quantize, activations = weights
        model = load(path, dtype=dtype, quantize=quantize, activations=activations, load_progress=progress)
    loaded = time.monotonic()
    engine = Engine(model, engine_config, programs=default_program_cache())
    with spinner("Compiling every step (kept for the next time)"):
        engine.warmup()
    steps = engine.stats().compile
    click.echo(
        f"loaded in {loaded - began:.1f} s, {steps.num_compiled} steps compiled and {steps.num_loaded} found in the"
        f" cache in {time.monotonic() - loaded:.1f} s,"
        f" {engine.stats().num_free_pages * engine_config.page_size:,} tokens of KV cache",
        err=True,
    )
    frontend = Frontend(AsyncEngine(engine), model, engine_config, engine.max_model_len, config)
    return Server(create_app(frontend, __version__), frontend)
