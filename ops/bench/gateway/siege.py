"""Measure how long a gateway takes to answer one caller while strangers without a token attack it.

One gateway runs beside a process with the strangers and a caller that asks for /healthz a hundred times a second, in
turns on a connection that stays open and on a new one. Idle strangers ask once and stay; slow ones send a byte a
second; some send headers of 100 MB; some open and close 1,000 connections a second. A stranger that is cut off comes
again. All share the cores of this machine, so a machine with fewer than four says little.

    python -m ops.bench.gateway.siege [--seconds 20] [--idle 10000] [--only headers] [--json]
"""

import asyncio
import json
import multiprocessing
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import click
import httpx
from leasehold.errors import LeaseholdError
from rich.console import Console
from rich.table import Table

from ops.bench.gateway.throughput import running_pool, scratch
from ops.bench.measure import blank_table, cpu_seconds, percentiles, resident_mib
from schema import clock

#: Seconds after which strangers that are not in place fail the benchmark.
PATIENCE = 120.0
#: Seconds between two calls of the caller.
PAUSE = 0.01
#: Connections that strangers open at the same time.
TOGETHER = 200
#: Bytes of a large header, and of one piece of it.
LARGE, PIECE = 100_000_000, b"a" * 65_536
#: Strangers that send large headers.
SENDERS = 8
GET = b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n"
#: All connections of this benchmark come from one address.
SETTINGS = {"LEASEHOLD_GATEWAY_MAX_CONNECTIONS_PER_ADDRESS": "1000000"}
REFUSED = "leasehold_connections_refused_total{"


@dataclass
class Tally:
    """What the strangers did: connections they opened, those that failed or were cut off, bytes of large headers."""

    opened: int = 0
    failed: int = 0
    ended: int = 0
    sent: int = 0


class Stranger(asyncio.Protocol):
    """A connection that sends something at the beginning, and notes its end."""

    def __init__(self, tally: Tally, first: bytes) -> None:
        self._tally, self._first = tally, first
        self.transport: asyncio.Transport | None = None
        self.heard, self.over = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._tally.opened += 1
        if self._first:
            transport.write(self._first)

    def data_received(self, _: bytes) -> None:
        self.heard.set()

    def connection_lost(self, _: Exception | None) -> None:
        self._tally.ended += 1
        self.heard.set()
        self.over.set()


@dataclass
class Siege:
    """The strangers of one attack, in one event loop. `wanted`: how many there are, or how many come in a second."""

    host: str
    port: int
    wanted: int
    tally: Tally = field(default_factory=Tally)
    in_place: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, first: bytes = b"") -> Stranger | None:
        try:
            made = await asyncio.get_running_loop().create_connection(
                lambda: Stranger(self.tally, first), self.host, self.port
            )
        except OSError:
            self.tally.failed += 1
            return None
        return made[1]

    async def idle(self) -> None:
        """Hold connections that have asked once."""
        gate = asyncio.Semaphore(TOGETHER)

        async def one() -> None:
            while True:
                async with gate:
                    stranger = await self.open(GET)
                    if stranger is not None:
                        await stranger.heard.wait()
                if self.tally.opened >= self.wanted:
                    self.in_place.set()
                await (asyncio.sleep(1) if stranger is None else stranger.over.wait())

        await asyncio.gather(*(one() for _ in range(self.wanted)))

    async def slow(self) -> None:
        """Send a header by a byte a second on each connection."""
        gate = asyncio.Semaphore(TOGETHER)

        async def one(number: int) -> None:
            await asyncio.sleep(number / self.wanted)
            while True:
                async with gate:
                    stranger = await self.open(GET[:-2] + b"A: ")
                if self.tally.opened >= self.wanted:
                    self.in_place.set()
                while stranger is not None and not stranger.over.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stranger.over.wait(), 1.0)
                    assert stranger.transport is not None
                    stranger.transport.write(b"a")

        await asyncio.gather(*(one(number) for number in range(self.wanted)))

    async def headers(self) -> None:
        """Send large headers, without a pause."""
        self.in_place.set()

        async def one() -> None:
            while True:
                try:
                    _, writer = await asyncio.open_connection(self.host, self.port)
                    self.tally.opened += 1
                    writer.write(GET[:-2] + b"A: ")
                    for _ in range(LARGE // len(PIECE)):
                        writer.write(PIECE)
                        await writer.drain()
                        self.tally.sent += len(PIECE)
                    writer.write(b"\r\n\r\n")
                except OSError:
                    self.tally.ended += 1
                finally:
                    writer.transport.abort()
                await asyncio.sleep(0)

        await asyncio.gather(*(one() for _ in range(self.wanted)))

    async def churn(self) -> None:
        """Open connections and close them at once."""
        self.in_place.set()
        loop, began, begun = asyncio.get_running_loop(), clock.monotonic(), 0
        tasks: set[asyncio.Task[None]] = set()

        async def one() -> None:
            stranger = await self.open()
            if stranger is not None and stranger.transport is not None:
                stranger.transport.close()

        while True:
            while begun < (clock.monotonic() - began) * self.wanted and len(tasks) < TOGETHER:
                begun += 1
                task = loop.create_task(one())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.005)


ATTACKS: Mapping[str, Callable[[Siege], Any] | None] = {
    "nobody": None,
    "idle": Siege.idle,
    "slow": Siege.slow,
    "headers": Siege.headers,
    "churn": Siege.churn,
}


def _strangers(attack: str, host: str, port: int, wanted: int, channel: Connection) -> None:
    """Attack until a message comes, then send the tally: the main function of the strangers' process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def work() -> None:
        siege = Siege(host, port, wanted)
        method = ATTACKS[attack]
        assert method is not None
        task = asyncio.create_task(method(siege))
        await asyncio.wait((asyncio.create_task(siege.in_place.wait()), task), return_when=asyncio.FIRST_COMPLETED)
        channel.send("ready")
        siege.tally.opened = siege.tally.failed = siege.tally.ended = siege.tally.sent = 0
        await asyncio.get_running_loop().run_in_executor(None, channel.recv)
        channel.send(siege.tally)

    asyncio.run(asyncio.wait_for(work(), None))


@contextmanager
def besieged(attack: str, url: str, wanted: int) -> Iterator[Callable[[], Tally]]:
    """Attack inside the block; yields a function that ends the attack and returns its tally."""
    if ATTACKS[attack] is None:
        yield Tally
        return
    parts = urlsplit(url)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_strangers, args=(attack, parts.hostname, parts.port, wanted, theirs), daemon=True)
    child.start()

    def end() -> Tally:
        ours.send("stop")
        if not ours.poll(PATIENCE):
            raise LeaseholdError("the strangers do not stop")
        found = ours.recv()
        assert isinstance(found, Tally)
        return found

    try:
        if not ours.poll(PATIENCE) or ours.recv() != "ready":
            raise LeaseholdError(f"the strangers of '{attack}' are not in place after {PATIENCE:.0f} s")
        yield end
    finally:
        child.kill()
        child.join()


def calls(url: str, seconds: float) -> tuple[list[float], list[float]]:
    """Ask for /healthz until `seconds` are over; return the seconds of calls on the open and on new connections."""
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    kept, new = list[float](), list[float]()
    with socket.create_connection(address, timeout=PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = clock.monotonic() + seconds
        while (began := clock.monotonic()) < end:
            if len(kept) <= len(new):
                _ask(connection)
                kept.append(clock.monotonic() - began)
            else:
                with socket.create_connection(address, timeout=PATIENCE) as another:
                    _ask(another)
                new.append(clock.monotonic() - began)
            clock.sleep(PAUSE)
    return kept, new


def _ask(connection: socket.socket) -> None:
    connection.sendall(GET)
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        piece = connection.recv(65_536)
        answer += piece
        if not piece or not answer.startswith(b"HTTP/1.1 200"):
            raise LeaseholdError(f"/healthz was answered {answer[:100]!r}")


def siege(url: str, gateway: int, attack: str, *, wanted: int, seconds: float) -> dict[str, Any]:
    """Measure the caller during one attack."""
    before = _refused(url)
    with besieged(attack, url, wanted) as end:
        used, began = cpu_seconds(gateway), clock.monotonic()
        kept, new = calls(url, seconds)
        took, used = clock.monotonic() - began, cpu_seconds(gateway) - used
        resident = resident_mib(gateway)
        tally = end()
    after = _refused(url)
    return {
        "strangers": wanted,
        "open_connection_ms": percentiles(kept, (50, 99, 100)),
        "new_connection_ms": percentiles(new, (50, 99, 100)),
        "calls": len(kept) + len(new),
        "opened_per_second": round(tally.opened / took, 1),
        "failed": tally.failed,
        "cut_off": tally.ended,
        "header_mb": round(tally.sent / 1e6, 1),
        "gateway_cpu_percent": round(used / took * 100, 1),
        "gateway_mib": resident,
        "refused": {reason: count - before.get(reason, 0) for reason, count in after.items()},
    }


def _refused(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE).text.splitlines()
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines if line.startswith(REFUSED)}


def _table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    waits = (f"{kind} {rank}" for kind in ("open", "new") for rank in ("p50", "p99", "max"))
    others = ("strangers", "opened/s", "failed", "gateway CPU", "MiB")
    table = blank_table("/healthz of another caller, milliseconds", "attack", *waits, *others)
    for attack, seen in found.items():
        times = [f"{each:.1f}" for kind in ("open", "new") for each in seen[f"{kind}_connection_ms"].values()]
        rest = (f"{seen[name]:g}" for name in ("strangers", "opened_per_second", "failed", "gateway_cpu_percent"))
        table.add_row(attack, *times, *rest, f"{seen['gateway_mib']:g}")
    return table


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--seconds", type=click.FloatRange(1), default=20.0, show_default=True, help="Seconds of each attack.")
@click.option("--idle", type=click.IntRange(1, 25_000), default=10_000, show_default=True, help="Idle strangers.")
@click.option("--slow", type=click.IntRange(1, 25_000), default=1000, show_default=True, help="Slow strangers.")
@click.option(
    "--churn", type=click.IntRange(1, 10_000), default=1000, show_default=True, help="Connections opened a second."
)
@click.option("--only", type=click.Choice(list(ATTACKS)), multiple=True, help="Only this attack; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(seconds: float, idle: int, slow: int, churn: int, only: tuple[str, ...], *, as_json: bool) -> None:
    wanted = {"nobody": 0, "idle": idle, "slow": slow, "headers": SENDERS, "churn": churn}
    found = {}
    try:
        for attack in only or ATTACKS:
            with scratch() as data, running_pool(data, assigner=False, settings=SETTINGS) as running:
                found[attack] = siege(running.url, running.gateway, attack, wanted=wanted[attack], seconds=seconds)
    except (LeaseholdError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(found))
        return
    Console(width=140).print(_table(found))


if __name__ == "__main__":
    main()
