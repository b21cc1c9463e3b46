"""What Prometheus is told about a server; every server has a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """Requests, tokens, batches and times."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("plait_requests", "Requests answered.", ["path", "status"], registry=registry)
        self.prompt_tokens = Counter("plait_prompt_tokens", "Tokens of prompts read.", registry=registry)
        self.generation_tokens = Counter("plait_generation_tokens", "Tokens written.", registry=registry)
        self.waiting = Gauge("plait_requests_waiting", "Requests that wait for a place.", registry=registry)
        self.running = Gauge("plait_batch_rows", "Rows in the batch.", registry=registry)
        self.batch_size = Histogram(
            "plait_batch_size", "Rows that a step wrote one token for.", buckets=_ROWS, registry=registry
        )
        self.latency = Histogram(
            "plait_request_seconds",
            "From a request's header to the end of its answer.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_token = Histogram(
            "plait_time_to_first_token_seconds",
            "From a request's place in line to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
