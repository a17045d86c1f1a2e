"""The farm door's metrics. Labels have few values: what clients tell of themselves is bounded."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from google.rpc import code_pb2
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from schema import clock

#: The most tools and mnemonics that have labels of their own, those that come first.
MOST = 50
OTHER = "other"
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class DoorMetrics:
    """The metrics of one door, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._actions = Counter(
            "leasehold_farm_actions",
            "Actions that clients have asked for, by how they were answered (from the cache, by a job of others, by a"
            " new one), by the client's tool, and by the kind of action that it names.",
            ["answer", "tool", "mnemonic"],
            registry=registry,
        )
        self._ended = Counter(
            "leasehold_farm_jobs_ended",
            "Jobs of actions whose end the door has seen, by the status that their clients were told.",
            ["code"],
            registry=registry,
        )
        self._seconds = Histogram(
            "leasehold_farm_action_seconds",
            "Time from a call of Execute to its last answer, of calls that had one.",
            ["answer"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._streams = Gauge(
            "leasehold_farm_streams", "Clients that wait for an action at the moment.", registry=registry
        )
        self._workers = Gauge(
            "leasehold_farm_worker_calls", "Calls of workers that are held at the moment.", registry=registry
        )
        self._labels: dict[str, set[str]] = {"tool": set(), "mnemonic": set()}

    def watch(self, workers: Callable[[], float]) -> None:
        """Read the number of held calls of workers from here at every scrape."""
        self._workers.set_function(workers)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a client that waits while the block runs."""
        with self._streams.track_inprogress():
            yield

    def answered(self, answer: str, told: Mapping[str, str]) -> Callable[[], None]:
        """Count an action, by what its client has told of it; return what notes the time of its end."""
        tool, mnemonic = told.get("tool", "").partition(" ")[0], told.get("mnemonic", "")
        self._actions.labels(answer, self._label("tool", tool), self._label("mnemonic", mnemonic)).inc()
        began = clock.monotonic()
        return lambda: self._seconds.labels(answer).observe(clock.monotonic() - began)

    def ended(self, code: int) -> None:
        """Count a job whose end the door has seen. code: of the status of its ExecuteResponse."""
        self._ended.labels(code_pb2.Code.Name(code) if code in code_pb2.Code.values() else OTHER).inc()

    def serve(self, host: str, port: int) -> None:
        """Serve the metrics on a port of this address. Raises OSError."""
        start_http_server(port, addr=host, registry=self.registry)

    def _label(self, name: str, value: str) -> str:
        known = self._labels[name]
        if value and value not in known and len(known) < MOST:
            known.add(value)
        return value if value in known else OTHER
