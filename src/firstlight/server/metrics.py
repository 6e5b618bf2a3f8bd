"""What /metrics tells Prometheus. docs/server.md explains each; a test holds the two together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from firstlight.engine.messages import EngineStats
from firstlight.scheduling.sampling import ServiceClass

if TYPE_CHECKING:
    from firstlight.server.engine_client import Generation

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60, 300)
INTER_TOKEN_BUCKETS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
OUTCOMES = ("stop", "length", "abort", "refused", "queue_full", "failed")


class Metrics:
    """The registry of one server. Times are in seconds, sizes in tokens unless the name says otherwise."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        by_class = ("service_class",)
        self._first_token = self._histogram(
            "firstlight_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_BUCKETS,
        )
        self._inter_token = self._histogram(
            "firstlight_inter_token_seconds", "Between two tokens of a request.", INTER_TOKEN_BUCKETS
        )
        self._request = self._histogram(
            "firstlight_request_seconds", "From a request's arrival to its last token.", REQUEST_BUCKETS
        )
        self._requests = self._counter("firstlight_requests", "Requests by outcome.", (*by_class, "outcome"))
        self._prompt_tokens = self._counter("firstlight_prompt_tokens", "Prompt tokens of started requests.", by_class)
        self._cached_tokens = self._counter(
            "firstlight_cached_prompt_tokens", "Prompt tokens that the prefix cache had.", by_class
        )
        self._generated_tokens = self._counter("firstlight_generated_tokens", "Generated tokens.", by_class)
        self._running = self._gauge("firstlight_requests_running", "Requests that hold pages.", by_class)
        self._waiting = self._gauge("firstlight_requests_waiting", "Requests in the queue.", by_class)
        self._pages_used = self._gauge(
            "firstlight_pages_used", "KV pages in use: by running requests, or kept for reuse."
        )
        self._pages_capacity = self._gauge("firstlight_pages_capacity", "KV pages in all.")
        self._page_size = self._gauge("firstlight_page_size", "Tokens of a KV page.")
        self._slots_used = self._gauge(
            "firstlight_slots_used", "State slots in use: by running requests, or kept as checkpoints."
        )
        self._slots_capacity = self._gauge("firstlight_slots_capacity", "State slots in all.")
        self._hit_rate = self._gauge(
            "firstlight_prefix_cache_hit_rate", "Matched over queried prompt tokens since the start, 0 to 1."
        )
        self._device_reserved = self._gauge(
            "firstlight_device_reserved_bytes", "Memory held by the GPU's allocator; 0 on a CPU."
        )
        self._engine_sums = {
            "steps": self._counter("firstlight_engine_steps", "Steps of the engine."),
            "allocator_retries": self._counter(
                "firstlight_allocator_retries", "Times that the GPU's allocator gave memory back to find some."
            ),
            "preemptions": self._counter("firstlight_preemptions", "Requests set back to waiting for want of memory."),
            "prefix_queried_tokens": self._counter(
                "firstlight_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache."
            ),
            "prefix_matched_tokens": self._counter(
                "firstlight_prefix_matched_tokens", "Prompt tokens found there and used."
            ),
            "prefix_lost_tokens": self._counter(
                "firstlight_prefix_lost_tokens", "Prompt tokens found, but without a state checkpoint to go on from."
            ),
            "prefix_evicted_tokens": self._counter(
                "firstlight_prefix_evicted_tokens", "Tokens dropped from the prefix cache to make room."
            ),
        }
        self._seen = EngineStats()
        self._children = {service: _Children(self, service) for service in ServiceClass}

    def saw_tokens(self, generation: Generation, count: int, now: float) -> None:
        """`count` >= 1 tokens of a generation came at `now` (time.monotonic()); its own fields are not updated yet."""
        children = self._children[generation.service_class]
        children.generated.inc(count)
        if generation.generated == 0:
            children.first_token.observe(now - generation.arrival)
            count -= 1
            gap = 0.0
        else:
            gap = (now - generation.last_token_at) / count
        for _ in range(count):
            children.inter_token.observe(gap)

    def ended(self, generation: Generation, outcome: str) -> None:
        """A generation is over; `outcome` is one of OUTCOMES."""
        children = self._children[generation.service_class]
        children.prompt.inc(generation.prompt_tokens)
        children.cached.inc(generation.cached_tokens)
        children.outcomes[outcome].inc()
        if outcome in ("stop", "length"):
            children.request.observe(generation.last_token_at - generation.arrival)

    def turned_away(self, service_class: ServiceClass, outcome: str) -> None:
        """A request never reached the engine."""
        self._children[service_class].outcomes[outcome].inc()

    def render(self, stats: EngineStats) -> bytes:
        """The page in Prometheus' text format, with the engine's counts as of `stats`."""
        for service in ServiceClass:
            self._running.labels(service).set(stats.running.get(service, 0))
            self._waiting.labels(service).set(stats.waiting.get(service, 0))
        self._pages_used.set(stats.pages_used)
        self._pages_capacity.set(stats.pages_capacity)
        self._page_size.set(stats.page_size)
        self._slots_used.set(stats.slots_used)
        self._slots_capacity.set(stats.slots_capacity)
        self._device_reserved.set(stats.device_reserved_bytes)
        self._hit_rate.set(stats.prefix_matched_tokens / max(stats.prefix_queried_tokens, 1))
        for name, counter in self._engine_sums.items():
            counter.inc(max(getattr(stats, name) - getattr(self._seen, name), 0))
        self._seen = stats
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("service_class",), buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)


class _Children:
    """The metrics of one service class, looked up once: a step may touch them hundreds of times."""

    def __init__(self, metrics: Metrics, service: ServiceClass) -> None:
        self.first_token = metrics._first_token.labels(service)
        self.inter_token = metrics._inter_token.labels(service)
        self.request = metrics._request.labels(service)
        self.generated = metrics._generated_tokens.labels(service)
        self.prompt = metrics._prompt_tokens.labels(service)
        self.cached = metrics._cached_tokens.labels(service)
        self.outcomes = {outcome: metrics._requests.labels(service, outcome) for outcome in OUTCOMES}
