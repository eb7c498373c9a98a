"""The metrics that /metrics shows to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gpt2block.apps.serve.service import Service

TO_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)  # bucket bounds in seconds
BETWEEN = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
# Kind and name of a metric, attribute of the service with its value, and text
STATE = (
    (GaugeMetricFamily, "slots", "slots", "Continuations that can run together."),
    (GaugeMetricFamily, "rows_running", "running", "Continuations in slots."),
    (GaugeMetricFamily, "rows_waiting", "waiting", "Continuations that wait for a slot."),
    (CounterMetricFamily, "new_tokens", "tokens", "Tokens generated since the start."),
    (CounterMetricFamily, "overdrawn_tokens", "overdrawn",
     "Of these, tokens after the stop string of their text."),
    (CounterMetricFamily, "failed_steps", "failed",
     "Steps of the engine that failed, which the log has."),
)  # fmt: skip


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


class State(Collector):
    """The metrics STATE of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        for kind, name, value, text in STATE:
            yield kind(f"gpt2block_{name}", text, getattr(self._service, value))


class Metrics:
    """The Prometheus metrics of a server. Values such as the queue length come from `service`."""

    def __init__(self, service: Service) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        seconds = partial(Histogram, buckets=TO_FIRST, registry=registry)
        requests = "Requests by path and status."
        self._requests = counter("gpt2block_requests", requests, ["path", "status"])
        ready = "Until the answer, or its first part, is ready."
        self._seconds = seconds("gpt2block_request_seconds", ready, ["path"])
        faults = "Mistakes of the server, which the log has, also in streams that had begun."
        self._faults = counter("gpt2block_faults", faults, ["path"])
        self._prompt = counter("gpt2block_prompt_tokens", "Tokens of prompts of accepted requests.")
        self._sequences = counter("gpt2block_rows", "Continuations asked for.")
        events = "Between what a stream sends at once, of one token or more."
        self._between = Intervals("gpt2block_piece_seconds", events, BETWEEN)
        first = "From a request's arrival in the queue to its first token."
        service.observe_first = seconds("gpt2block_first_token_seconds", first).observe
        steps = "Between the steps of a continuation's tokens."
        between = Intervals("gpt2block_token_seconds", steps, BETWEEN)
        service.observe_between = between.add
        for each in (self._between, State(service), between):
            registry.register(each)

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
