"""The gateway's metrics. Labels have few values: route templates, status classes, topics, reasons."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from schema.postgres.standby import StandbyReads

#: Media type of the text that `GatewayMetrics.text` returns.
MEDIA_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
_CALLS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_BYTES = (256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0, 16777216.0)


M = TypeVar("M", Counter, Gauge, Histogram)


def _made(kind: type[M], *given: Any, **more: Any) -> M:
    """Make a metric whose `labels` remembers what it has returned: the library looks for it anew each time.

    A sync call asks six times, which was a tenth of what the event loop does for it.
    """
    metric = kind(*given, **more)
    metric.labels = cache(metric.labels)  # type: ignore[method-assign]
    return metric


class GatewayMetrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, histogram = partial(_made, Counter, registry=registry), partial(_made, Histogram, registry=registry)
        gauge = partial(_made, Gauge, registry=registry)
        self.requests = counter(
            "leasehold_requests",
            "Requests that the gateway has answered, by route and status class.",
            ["route", "status_class"],
        )
        self.seconds = histogram(
            "leasehold_request_seconds",
            "Time from the head of a request to the end of its answer, long polls included.",
            ["route"],
            buckets=_SECONDS,
        )
        self.bodies = histogram(
            "leasehold_request_body_bytes",
            "Sizes of the request bodies that the gateway has read.",
            ["route"],
            buckets=_BYTES,
        )
        self.refused = counter(
            "leasehold_requests_refused",
            "Requests that the gateway refused before any work was done, by reason.",
            ["reason"],
        )
        self.syncs = counter(
            "leasehold_syncs",
            "Sync calls that were answered at once or after a wait, or whose bots hung up or made a later call.",
            ["outcome"],
        )
        self.batches = histogram(
            "leasehold_sync_batch_calls", "Sync calls that were settled together in one transaction.", buckets=_CALLS
        )
        self.renewals = counter(
            "leasehold_sessions_renewed", "Sessions that the gateway kept alive because it held a call of their bots."
        )
        self.waits = gauge("leasehold_waits", "Long polls that are held at the moment, by wake-up topic.", ["topic"])
        self.looks = counter(
            "leasehold_wait_looks",
            "Queries that looked for news on behalf of every held long poll of a topic.",
            ["topic"],
        )
        self.failures = counter(
            "leasehold_internal_errors",
            "Requests that ended in an unexpected error; the log has each under its id.",
        )
        self.connections = gauge("leasehold_connections", "Connections of clients that are open at the moment.")
        self.connections_refused = counter(
            "leasehold_connections_refused", "Connections refused, or ended because of a limit, by reason.", ["reason"]
        )
        self._add_watched(gauge)

    def _add_watched(self, gauge: Callable[..., Gauge]) -> None:
        """Make the gauges that `watch` reads from elsewhere."""
        self._queue = gauge(
            "leasehold_work_queue",
            "Pieces of work, on the database or on bodies, that wait for a thread or run in one.",
        )
        self._connected = gauge(
            "leasehold_wakeups_connected",
            "Whether wake-ups arrive: 1, or 0 while long polls rely on the fallback poll.",
        )
        self._from_standby = gauge(
            "leasehold_standby_used",
            "Whether lists and reports are read from the standby of `database.read_url`: 1, or 0 while they are not.",
        )
        self._lag = gauge(
            "leasehold_standby_lag_seconds",
            "Seconds that this standby is behind at most. 0 without one; not a number if that is not known.",
        )
        self.policy = gauge(
            "leasehold_gateway_policy_version",
            "Version of the policy by which this gateway works; 0 while there is none.",
        )

    def watch(
        self, *, queue: Callable[[], float], connected: Callable[[], float], standby: StandbyReads | None = None
    ) -> None:
        """Read the gauges of the work queue, of wake-ups and of the standby from these at every scrape."""
        self._queue.set_function(queue)
        self._connected.set_function(connected)
        if standby is not None:
            self._lag.set_function(lambda: math.nan if standby.lag is None else standby.lag)
            self._from_standby.set_function(lambda: float(not standby.trouble))

    def levels(self) -> dict[str, float]:
        """Return the length of the work queue, and 1 if wake-ups arrive, else 0."""
        return {"queue": _sum(self._queue), "wakeups_connected": _sum(self._connected)}

    def totals(self) -> dict[str, float]:
        """Return how many requests were answered, how many of them with a server error, and connections refused."""
        return {
            "requests": _sum(self.requests),
            "failed": _sum(self.requests, status_class="5xx"),
            "connections_refused": _sum(self.connections_refused),
        }

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _sum(metric: Counter | Gauge, **labels: str) -> float:
    """Return the sum of a metric over its series with these labels."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(
        sample.value
        for sample in samples
        if not sample.name.endswith("_created") and labels.items() <= sample.labels.items()
    )
