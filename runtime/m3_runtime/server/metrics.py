"""What GET /metrics shows, in the text format of Prometheus."""

from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m3_runtime.request import End
from m3_runtime.scheduler import BatchSession, Scheduler

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Metrics:
    """Counters of one server."""

    def __init__(self, scheduler: Scheduler, session: BatchSession) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SchedulerCollector(scheduler, session))
        self._requests = Counter(
            "m3_http_requests", "Responses by path and status.", ["path", "status"], registry=self._registry
        )
        self._queue = self._histogram("m3_queue_seconds", "From the arrival of a request to its begin.", _SECONDS)
        self._first = self._histogram("m3_prefill_seconds", "From the begin of a request to its first token.", _SECONDS)
        self._token = self._histogram(
            "m3_token_seconds", "Between tokens of an answer, its mean for each.", _TOKEN_SECONDS
        )

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, buckets=buckets, registry=self._registry)

    def answered(self, path: str, status: int) -> None:
        """path: of a known endpoint."""
        self._requests.labels(path, str(status)).inc()

    def ended(self, end: End) -> None:
        """A job that generated something."""
        if end.generated_tokens:
            self._queue.observe(end.queue_seconds)
            self._first.observe(end.prefill_seconds)
        if end.generated_tokens > 1:
            self._token.observe(end.decode_seconds / (end.generated_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Counting:
    """Middleware that counts responses, those of unknown paths together."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, paths: Collection[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, counted)


class _SchedulerCollector(Collector):
    """The scheduler's own numbers, as they are when somebody asks."""

    def __init__(self, scheduler: Scheduler, session: BatchSession) -> None:
        self._scheduler = scheduler
        self._session = session

    def collect(self) -> Iterator[Metric]:
        scheduler, totals = self._scheduler, self._scheduler.totals
        used, pages = self._session.pages()
        gauges = (
            ("m3_requests_running", "Requests at work.", scheduler.running),
            ("m3_requests_waiting", "Requests in the queue.", scheduler.waiting),
            ("m3_pages_used", "Pages of the cache that hold tokens.", used),
            ("m3_pages", "Pages of the cache.", pages),
            ("m3_cached_prefix_tokens", "Tokens kept for later requests.", scheduler.cache.cached_tokens),
        )
        for name, about, value in gauges:
            yield GaugeMetricFamily(name, about, value=value)
        counters = (
            ("m3_prompt_tokens", "Tokens of prompts.", totals.prompt_tokens),
            ("m3_prompt_cached_tokens", "Tokens of prompts that were not evaluated again.", totals.cached_tokens),
            ("m3_generated_tokens", "Tokens of answers.", totals.generated_tokens),
            ("m3_evaluated_tokens", "Tokens that went through the model.", totals.evaluated_tokens),
            ("m3_batches", "Evaluations.", totals.batches),
            ("m3_preemptions", "Requests that had to give their pages back for a while.", totals.preemptions),
            ("m3_evictions", "Cached prefixes that were dropped.", scheduler.cache.evictions),
        )
        for name, about, value in counters:
            yield CounterMetricFamily(name, about, value=value)
        ends = CounterMetricFamily("m3_requests_ended", "Requests by what ended them.", labels=["reason"])
        for reason, count in totals.ends.items():
            ends.add_metric([reason.value], count)
        yield ends
