"""What an engine tells Prometheus: counts and times of requests, and its status at the moment of asking."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable

from polyrhythm.engine.embedded.engine import InferenceEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "polyrhythm_engine_"
_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class RequestMetrics:
    """Counts requests by route and status, and sorts their seconds into buckets."""

    def __init__(self) -> None:
        self._num_requests: Counter[tuple[str, int]] = Counter()
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(_BOUNDS_S) + 1))
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def record(self, route: str, status: int, seconds: float) -> None:
        self._num_requests[route, status] += 1
        self._buckets[route][bisect_left(_BOUNDS_S, seconds)] += 1
        self._seconds[route] += seconds

    def lines(self) -> Iterable[str]:
        yield from _header(
            "requests_total", "counter", "Requests by route and HTTP status; 499 means that the client left."
        )
        for (route, status), count in sorted(self._num_requests.items()):
            yield f'{_PREFIX}requests_total{{route="{route}",status="{status}"}} {count}'
        yield from _header("request_seconds", "histogram", "From a request's arrival to the end of its answer.")
        for route, buckets in sorted(self._buckets.items()):
            total = 0
            for bound, count in zip([*map(str, _BOUNDS_S), "+Inf"], buckets, strict=True):
                total += count
                yield f'{_PREFIX}request_seconds_bucket{{route="{route}",le="{bound}"}} {total}'
            yield f'{_PREFIX}request_seconds_sum{{route="{route}"}} {self._seconds[route]}'
            yield f'{_PREFIX}request_seconds_count{{route="{route}"}} {total}'


def metrics_text(engine: InferenceEngine, requests: RequestMetrics) -> str:
    """The page at `/metrics`."""
    status = engine.status()
    lines = list(requests.lines())
    for name, kind, value, meaning in (
        ("completions_running", "gauge", status.num_running, "Completions being generated."),
        ("completions_waiting", "gauge", status.num_waiting, "Completions that wait for room in the batch."),
        ("generated_tokens_total", "counter", status.num_tokens_generated, "Tokens drawn since the start."),
        ("busy_seconds_total", "counter", status.busy_s, "Time spent computing."),
        ("policy_version", "gauge", status.policy_version, "Version of the loaded weights; -1 is none."),
        ("threads", "gauge", status.num_threads, "CPU threads in use."),
        ("kv_cache_tokens", "gauge", engine.num_kv_tokens, "Room of the key/value cache."),
        ("kv_cache_tokens_used", "gauge", engine.num_kv_tokens_used, "Of that, held by running requests."),
    ):
        lines += [*_header(name, kind, meaning), f"{_PREFIX}{name} {value}"]
    return "\n".join(lines) + "\n"


def _header(name: str, kind: str, meaning: str) -> Iterable[str]:
    yield f"# HELP {_PREFIX}{name} {meaning}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
