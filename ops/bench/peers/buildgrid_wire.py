"""Run BuildGrid's own servers, and bots that call them over gRPC, in processes and tasks of their own.

A server is `bgd server start` with a storage in memory, the scheduler on PostgreSQL, and the services of execution and
bots. Bots are tasks of this process. Each call of a bot reports all its leases as completed, and its answer holds the
next ones, because the scheduler fills a bot that calls (`proactive-fetch-to-capacity`); so no assigner is needed, which
would take processor time from the servers.
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import contest
import grpc
from buildgrid._protos.google.devtools.remoteworkers.v1test2 import bots_pb2, bots_pb2_grpc, worker_pb2

INSTANCE = "bench"
HOST = "127.0.0.1"
#: Threads of a server beside two for each of its bots, and connections to the database beside those for calls.
SPARE = 8
#: Seconds that a bot gives the server to open its session: too few to be held until an assigner has a job for it.
OPENING = 2.5
#: Bots that open their sessions at the same time.
TOGETHER = 10
#: A server's configuration, in BuildGrid's own form.
CONFIGURATION = """
server:
  - !channel
    address: {address}
    insecure-mode: true
authorization:
  method: none
monitoring:
  enabled: false
thread-pool-size: {threads}
connections:
  - !sql-connection &sql
    connection-string: {url}
    pool-size: {connections}
    max-overflow: 0
storages:
  - !lru-storage &storage
    size: 64M
schedulers:
  - !sql-scheduler &scheduler
    sql: *sql
    storage: *storage
    property-set:
      !dynamic-property-set {{}}
    proactive-fetch-to-capacity: true
instances:
  - name: {instance}
    services:
      - !execution
        scheduler: *scheduler
"""


@dataclass
class Drained:
    """What the bots have done. `reported`: jobs of all calls; the others are those between `first` and `last`."""

    reported: int = 0
    jobs: int = 0
    calls: int = 0
    first: float = 0.0
    last: float = 0.0
    waits: list[float] = field(default_factory=list)

    def as_result(self) -> dict[str, Any]:
        """Return the run as a shape gives it; costs are not counted."""
        ordered = sorted(self.waits)
        ranks = {f"p{percent}_ms": ordered[-(-percent * len(ordered) // 100) - 1] * 1000 for percent in (50, 99)}
        return {
            "jobs": self.jobs,
            "seconds": self.last - self.first,
            "calls": self.calls,
            **{name: round(value, 3) for name, value in ranks.items()},
        }


class Bots:
    """Bots that report what they hold as completed until `wanted` jobs are."""

    def __init__(self, wanted: int, servers: Sequence["Server"]) -> None:
        self._wanted, self._servers = wanted, servers
        self._drained = Drained()
        self._opening = asyncio.Semaphore(TOGETHER)

    async def work(self, bots: int, capacity: int) -> Drained:
        channels = [grpc.aio.insecure_channel(server.address) for server in self._servers]
        try:
            stubs = [bots_pb2_grpc.BotsStub(channel) for channel in channels]
            numbers = range(bots)
            opened = await asyncio.gather(*[self._open(stubs[n % len(stubs)], n, capacity) for n in numbers])
            await asyncio.gather(*[self._serve(stubs[n % len(stubs)], session) for n, session in enumerate(opened)])
        finally:
            for channel in channels:
                await channel.close()
        return self._drained

    async def _open(self, stub: Any, number: int, capacity: int) -> Any:
        worker = worker_pb2.Worker(configs=[worker_pb2.Worker.Config(key="capacity", value=str(capacity))])
        session = bots_pb2.BotSession(bot_id=f"bot-{number}", status=bots_pb2.OK, worker=worker)
        request = bots_pb2.CreateBotSessionRequest(parent=INSTANCE, bot_session=session)
        async with self._opening:
            return await stub.CreateBotSession(request, timeout=OPENING)

    async def _serve(self, stub: Any, session: Any) -> None:
        """Call until enough jobs are completed; what the last call brings stays where it is."""
        drained = self._drained
        while drained.jobs < self._wanted:
            reported = len(session.leases)
            for lease in session.leases:
                lease.state = bots_pb2.COMPLETED
            began = time.monotonic()
            request = bots_pb2.UpdateBotSessionRequest(name=session.name, bot_session=session)
            session = await stub.UpdateBotSession(request, timeout=contest.DONE_WITHIN)
            now = time.monotonic()
            drained.reported += reported
            if not reported:
                continue
            if not drained.first:
                # The time runs from the first completed jobs, so these are not among those that are counted.
                drained.first = now
            elif drained.jobs < self._wanted:
                drained.last = now
                drained.jobs += reported
                drained.calls += 1
                drained.waits.append(now - began)


class Server:
    """A running server."""

    def __init__(self, address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.address, self._process, self._log = address, process, log

    def ready(self) -> None:
        """Wait until the server answers. Raises Failed with the end of what it wrote."""
        with grpc.insecure_channel(self.address) as channel:
            answers, deadline = grpc.channel_ready_future(channel), time.monotonic() + contest.READY_WITHIN
            while time.monotonic() < deadline and self._process.poll() is None:
                try:
                    return answers.result(timeout=0.5)
                except grpc.FutureTimeoutError:
                    pass
        told = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        raise contest.Failed(f"bgd server start was not ready: {' '.join(told[-2:]) or 'it said nothing'}")


def drain(settings: contest.Settings, url: str) -> Drained:
    """Start `processes` servers and let bots complete `jobs` jobs of the queue.

    A server has two threads for each of its bots, so that no call is refused: a bot may call again before its last call
    has given its thread back. It has as many database connections as the setting `threads`, so that this many calls use
    the database at once.
    """
    with servers(settings, url) as running:

        async def work() -> Drained:
            return await Bots(settings.jobs, running).work(settings.bots, settings.capacity)

        try:
            return asyncio.run(work())
        except grpc.aio.AioRpcError as error:
            raise contest.Failed(f"a call of a bot failed: {error.code().name}: {error.details()}") from error


@contextmanager
def servers(settings: contest.Settings, url: str) -> Iterator[list[Server]]:
    """Start the servers, wait until they answer, and stop them at the end."""
    bots = -(-settings.bots // settings.processes)
    threads, connections = 2 * bots + SPARE, settings.threads + SPARE
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="buildgrid-")))
        running = []
        for number in range(settings.processes):
            # A bound socket keeps the port for the server, which may listen there although it is bound.
            kept = stack.enter_context(socket.socket())
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((HOST, 0))
            address = f"{HOST}:{kept.getsockname()[1]}"
            configuration, log = place / f"{number}.yml", place / f"{number}.log"
            configuration.write_text(
                CONFIGURATION.format(
                    address=json.dumps(address),
                    url=json.dumps(url),
                    threads=threads,
                    connections=connections,
                    instance=INSTANCE,
                )
            )
            program = (Path(sys.executable).parent / "bgd", "server", "start", configuration)
            process = subprocess.Popen(program, stdout=log.open("wb"), stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            running.append(Server(address, process, log))
        for server in running:
            server.ready()
        yield running
