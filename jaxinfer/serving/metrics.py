"""Prometheus metrics, under the names that vLLM's users know, with the prefix jaxinfer_."""

import dataclasses
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from jaxinfer.engine.stats import EngineStats
from jaxinfer.serving.config import ServerConfig

LATENCY = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKEN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
TOKENS = tuple(float(1 << i) for i in range(18))


class Metrics:
    """The metrics of one server, in a registry of its own."""

    def __init__(self, config: ServerConfig):
        """Labels everything but HTTP requests with the model's name."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"jaxinfer_{name}", text, ["model_name"], registry=self.registry).labels(config.model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"jaxinfer_{name}", text, ["model_name"], registry=self.registry).labels(config.model_name)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            metric = Histogram(f"jaxinfer_{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
            return metric.labels(config.model_name)

        self.running = gauge("num_requests_running", "Completions that hold a place in the engine.")
        self.waiting = gauge("num_requests_waiting", "Completions that wait for one.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Used share of the KV pages, 0 to 1.")
        self.free_pages = gauge("kv_cache_free_pages", "KV pages that are free.")
        self.preemptions = counter("num_preemptions", "Completions that lost their pages to others.")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens that the prefix cache was asked for.")
        self.prefix_hits = counter("prefix_cache_hits", "Those of them that it had.")
        self.evictions = counter("kv_cache_evictions", "Cached KV pages whose device memory was needed.")
        self.host_pages = gauge("host_cache_pages", "KV pages in host memory.")
        self.disk_pages = gauge("disk_cache_pages", "KV pages on disk.")
        self.host_hits = counter("host_cache_hits", "KV pages that came back from host memory.")
        self.disk_hits = counter("disk_cache_hits", "KV pages that came back from disk.")
        self.host_evictions = counter("host_cache_evictions", "KV pages whose host memory was needed.")
        self.disk_evictions = counter("disk_cache_evictions", "KV pages whose place on disk was needed.")
        self.bytes_out = counter("kv_cache_bytes_out", "Bytes of KV pages copied from the device to the host.")
        self.bytes_in = counter("kv_cache_bytes_in", "Bytes of KV pages copied from the host to the device.")
        self.steps = counter("engine_steps", "Steps that were enqueued on the device.")
        self.compilations = counter("compilations", "Step shapes that were compiled.")
        self.recompilations = counter("compilations_after_warmup", "Those that a request had to wait for.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of the prompts that were answered or begun.")
        self.generation_tokens = counter("generation_tokens", "Tokens that were generated.")
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", FIRST_TOKEN
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens; those of one step share its time.", TOKEN_LATENCY
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a completion's tokens after the first.",
            TOKEN_LATENCY,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From the request's arrival to a completion's last token.", LATENCY
        )
        self.queue_time = histogram("request_queue_time_seconds", "Waiting for a place in the engine.", LATENCY)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens of a completion.", TOKENS)
        success = Counter(
            "jaxinfer_request_success", "Completions by the reason of their end.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.success = {reason: success.labels(config.model_name, reason) for reason in ("stop", "length", "error")}
        self.aborted = success.labels(config.model_name, "abort")
        self.http_requests = Counter(
            "jaxinfer_http_requests", "HTTP requests by route and status.", ["path", "status"], registry=self.registry
        )
        self._seen: dict[Counter, int] = {}

    def observe_engine(self, stats: EngineStats) -> None:
        """Takes over a snapshot of the engine."""
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.free_pages.set(stats.num_free_pages)
        self.kv_usage.set(stats.num_used_pages / (stats.num_used_pages + stats.num_free_pages))
        tiers = stats.tiers
        self.host_pages.set(tiers.num_host_pages)
        self.disk_pages.set(tiers.num_disk_pages)
        for counter, total in (
            (self.evictions, stats.num_evictions),
            (self.host_hits, tiers.num_host_hits),
            (self.disk_hits, tiers.num_disk_hits),
            (self.host_evictions, tiers.num_host_evictions),
            (self.disk_evictions, tiers.num_disk_evictions),
            (self.bytes_out, tiers.num_pages_out * tiers.page_bytes),
            (self.bytes_in, tiers.num_pages_in * tiers.page_bytes),
            (self.preemptions, stats.num_preemptions),
            (self.prefix_queries, stats.prefix_cache.num_query_tokens),
            (self.prefix_hits, stats.prefix_cache.num_hit_tokens),
            (self.steps, stats.num_steps),
            (self.compilations, stats.compile.num_compiled),
            (self.recompilations, stats.compile.num_after_warmup),
        ):
            counter.inc(total - self._seen.get(counter, 0))
            self._seen[counter] = total

    def exposition(self) -> bytes:
        """Returns the metrics in Prometheus's text format."""
        return generate_latest(self.registry)


@dataclasses.dataclass
class CompletionTimer:
    """Times of one completion, in seconds of `time.monotonic`."""

    arrival: float
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0

    def tokens(self, metrics: Metrics, count: int, time: float) -> None:
        """Records tokens that a step gave at `time`."""
        if not count:
            return
        metrics.generation_tokens.inc(count)
        if self.first is None:
            self.first = time
            metrics.time_to_first_token.observe(time - self.arrival)
        else:
            for _ in range(count):
                metrics.inter_token_latency.observe((time - self.last) / count)
        self.last = time
        self.num_tokens += count

    def finish(self, metrics: Metrics, reason: str, queued: float | None) -> None:
        """Records the end of the completion, which waited for `queued` seconds."""
        metrics.success[reason].inc()
        metrics.request_generation_tokens.observe(self.num_tokens)
        metrics.e2e_latency.observe(self.last - self.arrival)
        if queued is not None:
            metrics.queue_time.observe(queued)
        if self.first is not None and self.num_tokens > 1:
            metrics.time_per_output_token.observe((self.last - self.first) / (self.num_tokens - 1))
