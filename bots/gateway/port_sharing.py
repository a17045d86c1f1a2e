"""One port served by several gateway processes: who takes the next connection, who is ready, and everybody's metrics.

All processes accept from one listening socket, which their parent holds. So a connection never waits for a process that
is dead or hangs, nobody else can bind the port while one is restarted, and TLS, Unix sockets, port 0 and macOS are no
special cases. Sockets of their own by SO_REUSEPORT would do none of that: the system would go on giving each process
its share of connections while it hangs.

A plain shared socket wakes all processes and lets the first one win, often the same one, and bots keep their
connections. So each process leaves a connection for a moment to those that have fewer. How many each has is in memory
that all map. A file that has no name holds it: it vanishes with the last of the processes, however they end.
"""

import json
import mmap
import os
import socket
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

import structlog
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

#: Environment variable by which the parent tells a process its number and the files that it inherits.
VARIABLE = "LEASEHOLD_SHARED_PORT"
#: How many more connections than the others a process may have before it leaves the next one to them.
AHEAD = 2
#: Seconds for which it leaves it to them. Then it takes it, because they may hang.
YIELD_SECONDS = 0.002
#: Seconds between two publications of a process's metrics for the others.
PUBLISH_SECONDS = 5.0

_COUNT = struct.Struct("=I")
#: Count of a process that does not accept connections: it starts, ends or is dead.
_ABSENT = 0xFFFF_FFFF
#: Bytes of the counts, and of what each process publishes. Blocks of the file that nobody writes take no memory.
_COUNTS_BYTES, _METRICS_BYTES = mmap.PAGESIZE, 4 * 1024 * 1024
#: Length and checksum in front of what a process publishes: who reads while it is written sees that and reads again.
_HEAD = struct.Struct("=II")
_READS = 3

_log = structlog.get_logger(__name__)

#: A sample of a metric: its name, labels and value.
_Sample = tuple[str, Mapping[str, str], float]


def _file_without_name() -> int:
    """Return the descriptor of a file in memory; on systems without such files, of one in the temporary directory."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("leasehold-port")
    file, path = tempfile.mkstemp(prefix="leasehold-port-")
    os.unlink(path)
    return file


class SharedPort:
    """A listening socket, and what the processes that accept from it know of each other.

    number: that of this process, from 1 on; 0 = the parent, which accepts nothing.
    """

    def __init__(self, listener: socket.socket, file: int, *, number: int, processes: int) -> None:
        """Make a port. file: the descriptor of the file that the processes share."""
        self.listener, self.number, self.processes = listener, number, processes
        self._file = file
        self._counts = mmap.mmap(file, _COUNTS_BYTES)
        self._published_at = -PUBLISH_SECONDS

    @classmethod
    def create(cls, listener: socket.socket, *, processes: int) -> Self:
        """Return the port as the parent has it. Nobody accepts yet."""
        file = _file_without_name()
        os.truncate(file, _COUNTS_BYTES + processes * _METRICS_BYTES)
        port = cls(listener, file, number=0, processes=processes)
        for number in range(1, processes + 1):
            port.left(number)
        return port

    @classmethod
    def inherited(cls, invitation: str) -> Self:
        """Return the port as a process has it that was started with this invitation."""
        number, processes, listener, file = (int(word) for word in invitation.split(":"))
        for inherited in (listener, file):
            os.set_inheritable(inherited, False)
        return cls(socket.socket(fileno=listener), file, number=number, processes=processes)

    def invitation(self, number: int) -> str:
        """Return the value of `VARIABLE` for a process, which must inherit `files`."""
        return f"{number}:{self.processes}:{self.listener.fileno()}:{self._file}"

    @property
    def files(self) -> tuple[int, int]:
        """The descriptors that a process inherits."""
        return (self.listener.fileno(), self._file)

    def close(self) -> None:
        """Give up this process's listener and its view of the others."""
        self.listener.close()
        self._counts.close()
        os.close(self._file)

    # Whose turn it is

    def has(self, connections: int) -> None:
        """Tell the others how many connections this process has; the first time, that it accepts them."""
        _COUNT.pack_into(self._counts, _COUNT.size * self.number, connections)

    def took_one(self) -> None:
        """Count a connection that was just accepted, until `has` tells the true number."""
        self.has(self._count(self.number) + 1)

    def left(self, number: int) -> None:
        """Note that a process does not accept connections."""
        _COUNT.pack_into(self._counts, _COUNT.size * number, _ABSENT)

    def leave(self) -> None:
        """Tell the others that this process does not accept connections any more."""
        self.left(self.number)

    @property
    def is_my_turn(self) -> bool:
        """True if this process should take the next connection: no other has clearly fewer of them."""
        fewest = min(self._count(number) for number in range(1, self.processes + 1))
        return self._count(self.number) <= fewest + AHEAD

    @property
    def accepting(self) -> int:
        """How many processes accept connections."""
        return sum(self._count(number) != _ABSENT for number in range(1, self.processes + 1))

    def _count(self, number: int) -> int:
        found: int = _COUNT.unpack_from(self._counts, _COUNT.size * number)[0]
        return found

    # Metrics

    def publish(self, registry: CollectorRegistry, *, now: float, every: float = PUBLISH_SECONDS) -> None:
        """Let the other processes read these metrics, if the last time is at least `every` seconds ago."""
        if now - self._published_at < every:
            return
        self._published_at = now
        families = [
            (family.name, family.documentation, family.type, [(each.name, each.labels, each.value) for each in samples])
            for family in registry.collect()
            if (samples := family.samples)
        ]
        said = json.dumps(families, separators=(",", ":")).encode()
        if len(said) <= _METRICS_BYTES - _HEAD.size:
            try:
                os.pwrite(self._file, _HEAD.pack(len(said), zlib.crc32(said)) + said, self._place(self.number))
            except OSError as error:  # where the file is on a disk, that may be full
                _log.warning("metrics could not be published", error=error.strerror)

    def metrics_text(self, registry: CollectorRegistry, *, now: float) -> bytes:
        """Return the metrics of all processes in Prometheus' text format, each sample with the label `process`.

        Those of this process are as they are, and become known to the others at once, so that no counter ever seems to
        go back. Those of the others are at most `PUBLISH_SECONDS` old.
        """
        self.publish(registry, now=now, every=0.0)
        merged = CollectorRegistry()
        merged.register(_Merged({str(number): self._published(number) for number in range(1, self.processes + 1)}))
        return generate_latest(merged)

    def _published(self, number: int) -> list[tuple[str, str, str, list[_Sample]]]:
        """Return what a process has published last; nothing of one that does not accept connections."""
        if self._count(number) == _ABSENT:
            return []
        for _ in range(_READS):
            length, checksum = _HEAD.unpack(os.pread(self._file, _HEAD.size, self._place(number)))
            said = os.pread(self._file, length, self._place(number) + _HEAD.size)
            if length and zlib.crc32(said) == checksum:
                found: list[tuple[str, str, str, list[_Sample]]] = json.loads(said)
                return found
        return []

    @staticmethod
    def _place(number: int) -> int:
        return _COUNTS_BYTES + (number - 1) * _METRICS_BYTES


class _Merged(Collector):
    """The families of several processes, by the number of each."""

    def __init__(self, published: Mapping[str, Iterable[tuple[str, str, str, list[_Sample]]]]) -> None:
        self._published = published

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for number, families in self._published.items():
            for name, documentation, kind, samples in families:
                family = merged.setdefault(name, Metric(name, documentation, kind))
                for sample, labels, value in samples:
                    family.add_sample(sample, {**labels, "process": number}, value)
        yield from merged.values()
