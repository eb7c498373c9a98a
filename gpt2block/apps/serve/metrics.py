"""The metrics that /metrics shows to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpt2block.apps.serve.service import Service

TO_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)  # bucket bounds in seconds
BETWEEN = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Intervals(Collector):
    """A Prometheus histogram to which many values are added at a time, which is faster."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, np.array([*bounds, np.inf])
        self._counts, self._total = np.zeros(len(self._bounds), np.int64), 0.0

    def add(self, seconds: NDArray[np.float64]) -> None:
        found = np.searchsorted(self._bounds, seconds)
        self._counts = self._counts + np.bincount(found, minlength=len(self._counts))
        self._total += float(seconds.sum())

    def collect(self) -> Iterator[Metric]:
        names = [*map(repr, self._bounds[:-1].tolist()), "+Inf"]
        buckets = list(zip(names, self._counts.cumsum().tolist(), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._total)


class Total(Collector):
    """A Prometheus counter whose value a function computes when it is read."""

    def __init__(self, name: str, text: str, value: Callable[[], float]) -> None:
        self._name, self._text, self._value = name, text, value

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, self._value())


class Metrics:
    """The Prometheus metrics of a server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "gpt2block_requests", "Requests by path and status.", ["path", "status"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "gpt2block_request_seconds", "Until the answer, or its first part, is ready.", ["path"],
            buckets=TO_FIRST, registry=registry,
        )  # fmt: skip
        self._faults = Counter(
            "gpt2block_faults", "Mistakes of the server, which the log has, also in streams that "
            "had begun.", ["path"], registry=registry,
        )  # fmt: skip
        self._prompt = Counter(
            "gpt2block_prompt_tokens", "Tokens of prompts of accepted requests.", registry=registry
        )
        self._sequences = Counter("gpt2block_rows", "Continuations asked for.", registry=registry)
        self._between = Intervals(
            "gpt2block_piece_seconds",
            "Between what a stream sends at once, of one token or more.",
            BETWEEN,
        )
        registry.register(self._between)

    def watch(self, service: Service) -> None:
        """Register metrics whose values are read from the service, such as its queue length."""
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "slots": ("Continuations that can run together.", lambda: service.slots),
            "rows_running": ("Continuations in slots.", lambda: service.open - service.waiting),
            "rows_waiting": ("Continuations that wait for a slot.", lambda: service.waiting),
        }
        for name, (text, value) in gauges.items():
            gauge = Gauge(f"gpt2block_{name}", text, registry=self.registry)
            gauge.set_function(value)
        tokens = "Tokens generated since the start."
        self.registry.register(Total("gpt2block_new_tokens", tokens, lambda: service.tokens))
        over = "Of these, tokens after the stop string of their text."
        self.registry.register(Total("gpt2block_overdrawn_tokens", over, lambda: service.overdrawn))
        failed = "Steps of the engine that failed, which the log has."
        self.registry.register(Total("gpt2block_failed_steps", failed, lambda: service.failed))
        first = Histogram(
            "gpt2block_first_token_seconds", "From a request's arrival in the queue to its first "
            "token.", buckets=TO_FIRST, registry=self.registry,
        )  # fmt: skip
        between = Intervals(
            "gpt2block_token_seconds", "Between the steps of a continuation's tokens.", BETWEEN
        )
        self.registry.register(between)
        service.observe_first, service.observe_between = first.observe, between.add

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Record the status and duration of a request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def fault(self, path: str) -> None:
        self._faults.labels(path).inc()

    def started(self, prompt_tokens: int, sequences: int) -> None:
        self._prompt.inc(prompt_tokens)
        self._sequences.inc(sequences)

    def between(self, seconds: Sequence[float]) -> None:
        """Record times between two events of a stream."""
        self._between.add(np.array(seconds))
