"""Limits of a server's connections: how many there are, how long each may take, and how much may stay unread.

One table per server holds all connections. Each waits for at most one thing at a time, and all that wait for the same
thing have the same time for it. So each kind of wait is a queue in the order of its deadlines, and `sweep` looks only
at connections whose time is up: 10,000 idle connections cost it nothing.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv6Address
from typing import Protocol

from bots.gateway.metrics import GatewayMetrics
from schema import clock

#: Open files that are kept for other things than connections of clients: the database's connections, logs, wake-ups.
RESERVED_FILES = 256
#: The most connections that a gateway takes unless its settings say otherwise. Each needs about 10 KB.
MOST_BY_DEFAULT = 32_768
#: Bits of an IPv6 address that tell clients apart. A client usually has all addresses of such a network.
NETWORK_BITS = 64


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection, and how many there may be. Sizes are in bytes, times in seconds.

    connections, per_address: how many may be open, of all clients and of one address.
    header_bytes, header_lines: request line and header together. header_seconds: from the connection, or from the
        first byte of a later request, to the end of its header.
    body_seconds: from the end of the header to the end of the body.
    framing_bytes: what chunked transfer may add to a body, beyond as much as the body; and what may follow the body.
    idle_seconds: between two requests.
    unread_seconds, unread_progress: of an unread answer the client must take that many bytes in that time.
    unread_bytes: memory of all unread answers together.
    linger_seconds, linger_bytes: what is read and dropped after a refusal, so that the client can read the refusal.
    pipelined: requests that may wait for the answer to an earlier one on the same connection.
    """

    connections: int = MOST_BY_DEFAULT
    per_address: int = MOST_BY_DEFAULT
    header_bytes: int = 64 * 1024
    header_lines: int = 200
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    framing_bytes: int = 64 * 1024
    idle_seconds: float = 75.0
    unread_seconds: float = 30.0
    unread_progress: int = 32 * 1024
    unread_bytes: int = 256 * 1024 * 1024
    linger_seconds: float = 2.0
    linger_bytes: int = 1024 * 1024
    pipelined: int = 100


class Wait(StrEnum):
    """What a connection waits for. While the gateway works on a request it waits for nothing."""

    HEADER = "header"
    BODY = "body"
    REQUEST = "request"
    UNREAD = "unread"
    LINGER = "linger"


class Waiting(Protocol):
    """A connection in the table; `HttpConnection` is one, whose module imports this one."""

    def expired(self, wait: Wait) -> None:
        """End the connection, because it waited for this for too long."""

    def unsent(self) -> int:
        """Return how many bytes the client has not taken, including those in the kernel."""

    def unsent_memory(self) -> int:
        """Return how many bytes of them are in this process."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """An unread answer: when it was looked at, how many bytes were left then, and how many of them in this process."""

    at: float
    left: int
    memory: int


class ConnectionTable:
    """The open connections of one gateway. Only the event loop's thread may use it."""

    def __init__(
        self, limits: ConnectionLimits, metrics: GatewayMetrics, *, now: clock.Monotonic = clock.monotonic
    ) -> None:
        self.limits, self._metrics, self._now = limits, metrics, now
        self._by_address: Counter[str] = Counter()
        self._open = 0
        self._seconds = {
            Wait.HEADER: limits.header_seconds,
            Wait.BODY: limits.body_seconds,
            Wait.REQUEST: limits.idle_seconds,
            Wait.UNREAD: limits.unread_seconds,
            Wait.LINGER: limits.linger_seconds,
        }
        self._since: dict[Wait, dict[Waiting, float]] = {wait: {} for wait in Wait}
        self._unread: dict[Waiting, _Unread] = {}
        self._unread_bytes = 0

    def admit(self, address: str | None) -> str | None:
        """Count a connection; return the reason if there is no place for it. None as address: a Unix socket."""
        network = network_of(address)
        reason = None
        if self._open >= self.limits.connections:
            reason = "connections"
        elif network and self._by_address[network] >= self.limits.per_address:
            reason = "connections_of_address"
        if reason is not None:
            self.refused(reason)
            return reason
        self._open += 1
        if network:
            self._by_address[network] += 1
        self._metrics.connections.inc()
        return None

    def dismiss(self, address: str | None) -> None:
        """Give back the place of an admitted connection."""
        network = network_of(address)
        self._open -= 1
        self._metrics.connections.dec()
        if network:
            self._by_address[network] -= 1
            if not self._by_address[network]:
                del self._by_address[network]

    def refused(self, reason: str) -> None:
        """Count a connection that is refused, or that ends because its client does not keep to a limit."""
        self._metrics.connections_refused.labels(reason).inc()

    def enter(self, connection: Waiting, wait: Wait) -> None:
        """Let the time for this wait begin now."""
        self._since[wait][connection] = self._now()

    def leave(self, connection: Waiting, wait: Wait) -> None:
        """End this wait."""
        self._since[wait].pop(connection, None)

    def unread(self, connection: Waiting) -> None:
        """Note that much of an answer is unread. The connections that began this first make room if it is too much."""
        memory = connection.unsent_memory()
        self._unread[connection] = _Unread(self._now(), connection.unsent(), memory)
        self._unread_bytes += memory
        while self._unread_bytes > self.limits.unread_bytes and len(self._unread) > 1:
            self._end_unread(next(iter(self._unread)), "unread_memory")

    def read(self, connection: Waiting) -> None:
        """Note that the client has taken most of an answer."""
        note = self._unread.pop(connection, None)
        if note is not None:
            self._unread_bytes -= note.memory

    def is_unread(self, connection: Waiting) -> bool:
        """Return True if much of an answer is unread."""
        return connection in self._unread

    def sweep(self) -> None:
        """End the connections that waited for too long."""
        now = self._now()
        for wait, members in self._since.items():
            for connection in list(_older(members, now - self._seconds[wait])):
                del members[connection]
                connection.expired(wait)
        for connection in list(self._unread_since(now - self.limits.unread_seconds)):
            left = connection.unsent()
            if left > self._unread[connection].left - self.limits.unread_progress:
                self._end_unread(connection, "unread")
            else:
                self.read(connection)
                self.unread(connection)

    def _unread_since(self, moment: float) -> Iterator[Waiting]:
        for connection, note in self._unread.items():
            if note.at > moment:
                return
            yield connection

    def _end_unread(self, connection: Waiting, reason: str) -> None:
        self.read(connection)
        self.refused(reason)
        connection.expired(Wait.UNREAD)


def _older(members: dict[Waiting, float], moment: float) -> Iterator[Waiting]:
    for connection, since in members.items():
        if since > moment:
            return
        yield connection


def network_of(address: str | None) -> str | None:
    """Return what clients are counted by: the address, or the network of an IPv6 address.

    What is no address, which a proxy may say, counts as it stands.
    """
    if address is None or ":" not in address:
        return address
    try:
        parsed = IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return parsed.packed[: NETWORK_BITS // 8].hex()
