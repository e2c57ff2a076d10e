"""What an engine tells Prometheus: counts and times of requests, and its status at the moment of asking."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from polyrhythm.messages import EngineStatus

_PREFIX = "polyrhythm_engine_"
_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

disable_created_metrics()  # else every series has a twin that says when it was made


class EngineMetrics:
    """Counts requests by route and status, sorts their seconds into buckets, and writes the page at `/metrics`."""

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, status: Callable[[], EngineStatus]):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{_PREFIX}requests",
            "Requests by route and HTTP status; 499 means that the client left.",
            ("route", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            f"{_PREFIX}request_seconds",
            "From a request's arrival to the end of its answer.",
            ("route",),
            buckets=_BOUNDS_S,
            registry=self._registry,
        )
        self._registry.register(_StatusCollector(status))

    def record(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], EngineStatus]):
        self._status = status

    def collect(self) -> Iterator[Metric]:
        now = self._status()
        for name, value, meaning in (
            ("completions_running", now.num_running, "Completions being generated."),
            ("completions_waiting", now.num_waiting, "Completions that wait for room in the batch."),
            ("policy_version", now.policy_version, "Version of the loaded weights; -1 is none."),
            ("threads", now.num_threads, "CPU threads in use."),
            ("kv_cache_tokens", now.num_kv_tokens, "Room of the key/value cache."),
            ("kv_cache_tokens_used", now.num_kv_tokens_used, "Of that, held by running requests."),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}{name}", meaning, value)
        yield CounterMetricFamily(
            f"{_PREFIX}generated_tokens", "Tokens drawn since the start.", now.num_tokens_generated
        )
        yield CounterMetricFamily(f"{_PREFIX}busy_seconds", "Time spent computing.", now.busy_s)
