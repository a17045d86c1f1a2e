"""Bots on raw sockets, which cost little, so that the gateway is measured and not its clients."""

import asyncio
import json
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from bots.protocol import Session
from schema import clock

#: Seconds after which a silent process fails the benchmark.
PATIENCE = 180.0
#: Average seconds after which a call that a busy gateway refused is repeated.
AGAIN = 2.0


@dataclass
class Results:
    """Results of the bots of one process: seconds of each call, finished jobs, errors."""

    waits: list[float] = field(default_factory=list)
    calls: int = 0
    jobs: int = 0
    refused: int = 0
    troubles: list[str] = field(default_factory=list)


class HttpConnection(asyncio.Protocol):
    """A keep-alive HTTP connection with one request at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._body_at = self._end = 0
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None
        self._refusal: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the gateway hung up: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._end:
            at = self._buffer.find(b"\r\n\r\n")
            if at < 0:
                return
            head = self._buffer[:at].lower()
            start = head.index(b"content-length:") + 15
            self._body_at = at + 4
            self._end = self._body_at + int(head[start:].split(b"\r", 1)[0])
        if len(self._buffer) < self._end:
            return
        status, body = int(self._buffer[9:12]), self._buffer[self._body_at : self._end]
        self._buffer, self._end = self._buffer[self._end :], 0
        if self._answer is None:
            # So a gateway answers a connection that is one too many.
            self._refusal = f"{status}: {body[:300]!r}"
        elif not self._answer.done():
            self._answer.set_result((status, body))

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request; the future holds status and body of the answer."""
        assert self._transport is not None
        if self._refusal is not None:
            raise ConnectionError(self._refusal)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer


class Bots:
    """The bots of one process, which run until the message `stop`."""

    def __init__(
        self, url: str, token: str, sessions: Sequence[Session], channel: Connection, *, wait: float, pause: float
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._sessions, self._channel, self._wait, self._pause = sessions, channel, wait, pause
        self._head = (
            f"POST /v1/sync HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer {token}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()
        self._results = Results()
        self._stopping = False
        self._chance = random.Random(1)

    async def run(self) -> None:
        """Connect and send `ready`; `count` resets the results, `stop` sends them and ends."""
        loop = asyncio.get_running_loop()
        tasks = []
        for one in self._sessions:
            # A gateway closes a connection that brings no request for some seconds.
            tasks.append(loop.create_task(self._serve(await self._dial(), one)))
            await asyncio.sleep(self._pause)
        self._channel.send("ready")
        while (wish := await loop.run_in_executor(None, self._channel.recv)) != "stop":
            assert wish == "count"
            self._results = Results(troubles=self._results.troubles)
        self._stopping = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._channel.send(self._results)

    async def _dial(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(HttpConnection, self._host, self._port))[1]

    async def _serve(self, line: HttpConnection, session: Session) -> None:
        try:
            await self._work(line, session)
        except Exception as error:
            if not self._stopping:
                self._results.troubles.append(f"{session.bot}: {type(error).__name__}: {error}")

    async def _work(self, line: HttpConnection, session: Session) -> None:
        known = f'{{"bot":"{session.bot}","epoch":{session.epoch},"secret":"{session.secret}","seq":'
        reports: list[dict[str, Any]] = []
        seq = 0
        while True:
            seq += 1
            rest = f'"wait":{self._wait}' if not reports else f'"leases":{json.dumps(reports)}'
            body = f"{known}{seq},{rest}}}".encode()
            began = clock.monotonic()
            request = self._head + str(len(body)).encode() + b"\r\n\r\n" + body
            status, answer = await line.ask(request)
            while status == 503:
                self._results.refused += 1
                await asyncio.sleep(self._chance.uniform(0.5, 1.5) * AGAIN)
                status, answer = await line.ask(request)
            now = clock.monotonic()
            if status != 200:
                raise ConnectionError(f"{status}: {answer[:300]!r}")
            self._results.calls += 1
            self._results.waits.append(now - began)
            self._results.jobs += len(reports)
            leases = json.loads(answer)["leases"]
            for work in leases:
                if work["payload"].get("told"):
                    self._channel.send((work["job"], now))
            done = {"verdict": "succeeded", "exit_code": 0}
            reports = [
                {"job": work["job"], "fence": work["fence"], "state": "completed", "outcome": done} for work in leases
            ]


class BotProcesses:
    """Bots that run in processes of their own."""

    def __init__(self, channels: Sequence[Connection]) -> None:
        self._channels = channels

    def count(self) -> None:
        """Reset the results of all bots."""
        for channel in self._channels:
            channel.send("count")

    def taken(self, job: str) -> float:
        """Return when that job, whose payload has `told`, arrived at its bot."""
        while True:
            for channel in multiprocessing.connection.wait(self._channels, PATIENCE) or _silent():
                assert isinstance(channel, Connection)
                named, when = channel.recv()
                if named == job:
                    return float(when)

    def stop(self) -> Results:
        """Stop all bots and return their results, added up."""
        whole = Results()
        for channel in self._channels:
            channel.send("stop")
        for channel in self._channels:
            while not isinstance(results := channel.recv(), Results):
                pass
            whole.waits += results.waits
            whole.calls += results.calls
            whole.jobs += results.jobs
            whole.refused += results.refused
            whole.troubles += results.troubles
        return whole


@contextmanager
def bot_processes(
    url: str, token: str, sessions: Sequence[Session], *, processes: int, wait: float, pause: float
) -> Iterator[BotProcesses]:
    """Connect a bot for each session. `wait`: seconds of a long poll. `pause`: seconds between two bots."""
    context = multiprocessing.get_context("spawn")
    children, channels = [], []
    for number in range(processes):
        ours, theirs = context.Pipe()
        arguments = (url, token, sessions[number::processes], theirs, wait, pause * processes)
        children.append(context.Process(target=_main, args=arguments, daemon=True))
        channels.append(ours)
    try:
        for child in children:
            child.start()
        for channel in channels:
            if not channel.poll(PATIENCE) or channel.recv() != "ready":
                _silent()
        yield BotProcesses(channels)
    finally:
        for child in children:
            child.kill()
            child.join()


def _main(url: str, token: str, sessions: Sequence[Session], channel: Connection, wait: float, pause: float) -> None:
    async def work() -> None:
        await Bots(url, token, sessions, channel, wait=wait, pause=pause).run()

    asyncio.run(work())


def _silent() -> list[Connection]:
    raise SystemExit("error: the bots say nothing")
