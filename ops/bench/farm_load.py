"""Clients that send actions and read each stream to its end, and workers that end every action at once.

Both speak the public APIs only, so the server may be any. Each action is another one, by its salt. A worker reports a
lease as ACTIVE, as the API has it, and with the next call as COMPLETED with an empty result.

    python -m ops.bench.farm_load ADDRESS [--instance NAME] [--workers 50] [--clients 100] [--seconds 20]

`--streams N` opens N streams of WaitExecution instead, on actions that no worker takes. It prints what they cost the
server: the memory and the processor time of the process `--pid`.
"""

import asyncio
import hashlib
import json
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc
import grpc.aio
from google.longrunning.operations_proto_pb2 import CancelOperationRequest, Operation
from google.protobuf.empty_pb2 import Empty

from bots.farm.protos import remote_execution_pb2, remote_workers_pb2

API = "/build.bazel.remote.execution.v2."
OPERATIONS = "/google.longrunning.Operations/"
BOTS = "/google.devtools.remoteworkers.v1test2.Bots/"
_LEASE, _STATUS = remote_workers_pb2.LeaseState, remote_workers_pb2.BotStatus
#: Seconds for which a worker lets its calls be held, and the longest that a call of a client may take.
HELD, ANSWERED = 10.0, 60.0
#: Seconds in which sessions open and streams begin before anything counts.
WARM = 3.0


@dataclass
class Counts:
    """What was seen while it counted. first, done: seconds from a call of Execute to its first answer and its end."""

    actions: int = 0
    first: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    failed: int = 0


class Load:
    """Workers and clients on one server. instance: as both name it."""

    def __init__(self, channels: list[grpc.aio.Channel], instance: str) -> None:
        self._channels, self._instance = channels, instance
        self._counts, self._counting, self._over = Counts(), False, False

    async def run(self, workers: int, clients: int, seconds: float) -> Counts:
        """Return what was done within this many seconds, once all work."""
        await self.upload([_command(), b""])
        tasks = [asyncio.create_task(self._work(number)) for number in range(workers)]
        tasks += [asyncio.create_task(self._ask(number)) for number in range(clients)]
        await asyncio.sleep(WARM)
        self._counting = True
        await asyncio.sleep(seconds)
        self._counting, self._over = False, True
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return self._counts

    async def _work(self, number: int) -> None:
        channel = self._channels[number % len(self._channels)]
        session = remote_workers_pb2.BotSession(bot_id=f"load-{number}", status=_STATUS.OK)
        session.worker.devices.add()
        asked = remote_workers_pb2.CreateBotSessionRequest(parent=self._instance, bot_session=session)
        session = await _call(channel, BOTS + "CreateBotSession", asked, remote_workers_pb2.BotSession)
        result = remote_execution_pb2.ActionResult()
        while not self._over:
            for lease in session.leases:
                if lease.state == _LEASE.PENDING:
                    lease.state = _LEASE.ACTIVE
                elif lease.state == _LEASE.ACTIVE:
                    lease.state = _LEASE.COMPLETED
                    lease.status.code = 0
                    lease.result.Pack(result)
            update = remote_workers_pb2.UpdateBotSessionRequest(name=session.name, bot_session=session)
            method = BOTS + "UpdateBotSession"
            session = await _call(channel, method, update, remote_workers_pb2.BotSession, within=HELD)

    async def _ask(self, number: int) -> None:
        channel = self._channels[number % len(self._channels)]
        call = channel.unary_stream(
            API + "Execution/Execute",
            request_serializer=remote_execution_pb2.ExecuteRequest.SerializeToString,
            response_deserializer=Operation.FromString,
        )
        while not self._over:
            action = _action()
            await self.upload([action])
            asked = remote_execution_pb2.ExecuteRequest(instance_name=self._instance, action_digest=_digest(action))
            began, first, last = time.monotonic(), 0.0, Operation()
            async for operation in call(asked, timeout=ANSWERED):
                first, last = first or time.monotonic() - began, operation
            if self._counting:
                self._note(last, first, time.monotonic() - began)

    def _note(self, operation: Operation, first: float, done: float) -> None:
        answer = remote_execution_pb2.ExecuteResponse()
        good = operation.done and operation.response.Unpack(answer) and not answer.status.code
        self._counts.failed += not good
        self._counts.actions += 1
        self._counts.first.append(first)
        self._counts.done.append(done)

    async def upload(self, blobs: list[bytes]) -> None:
        """Store blobs."""
        one = remote_execution_pb2.BatchUpdateBlobsRequest.Request
        asked = remote_execution_pb2.BatchUpdateBlobsRequest(
            instance_name=self._instance, requests=[one(digest=_digest(each), data=each) for each in blobs]
        )
        method = API + "ContentAddressableStorage/BatchUpdateBlobs"
        await _call(self._channels[0], method, asked, remote_execution_pb2.BatchUpdateBlobsResponse)


class Streams:
    """Streams of WaitExecution that stay open. pid: the server's process."""

    def __init__(self, channels: list[grpc.aio.Channel], instance: str, pid: int) -> None:
        self._channels, self._instance, self._pid = channels, instance, pid
        self._load, self._told = Load(channels, instance), 0

    async def run(self, streams: int, actions: int, seconds: float) -> dict[str, float]:
        """Open streams, spread evenly over the actions; return what the server's process needed for them."""
        await self._load.upload([_command(), b""])
        names = [await self._begun() for _ in range(actions)]
        before, began = _spent(self._pid), time.monotonic()
        tasks = [asyncio.create_task(self._wait(nth, names[nth % actions])) for nth in range(streams)]
        while self._told < streams and not any(task.done() for task in tasks):
            await asyncio.sleep(0.1)
        opened, since = _spent(self._pid), time.monotonic()
        opening, first = since - began, self._told
        await asyncio.sleep(seconds)
        after, passed = _spent(self._pid), time.monotonic() - since
        ended, told = [task for task in tasks if task.done()], self._told - first
        if ended and (error := ended[0].exception()):
            print(f"{len(ended)} streams ended early, the first by: {error}")
        for name in names:
            await _call(self._channels[0], OPERATIONS + "CancelOperation", CancelOperationRequest(name=name), Empty)
        ends = time.monotonic()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {
            "streams": streams,
            "ended_early": len(ended),
            "opened_seconds": opening,
            "opening_processor_seconds": opened[0] - before[0],
            "kib_per_stream": (after[1] - before[1]) / 1024 / streams,
            "mib_of_process": after[1] / 1024 / 1024,
            "processor_seconds_a_minute": (after[0] - opened[0]) / passed * 60,
            "messages_a_second": told / passed,
            "all_ended_seconds": time.monotonic() - ends,
        }

    async def _begun(self) -> str:
        """Begin an action that no worker offers to run, and return the name of its operation."""
        action = _action()
        await self._load.upload([action])
        asked = remote_execution_pb2.ExecuteRequest(instance_name=self._instance, action_digest=_digest(action))
        call = _stream(self._channels[0], "Execute", asked)
        name: str = (await call.read()).name
        call.cancel()
        return name

    async def _wait(self, number: int, name: str) -> None:
        call = _stream(
            self._channels[number % len(self._channels)],
            "WaitExecution",
            remote_execution_pb2.WaitExecutionRequest(name=name),
        )
        async for _ in call:
            self._told += 1


def _stream(channel: grpc.aio.Channel, method: str, asked: Any) -> Any:
    made = channel.unary_stream(
        API + f"Execution/{method}",
        request_serializer=type(asked).SerializeToString,
        response_deserializer=Operation.FromString,
    )
    return made(asked)


def _spent(pid: int) -> tuple[float, int]:
    """Processor seconds of a process so far, and bytes of its memory."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


async def _call(channel: grpc.aio.Channel, method: str, asked: Any, answer: Any, *, within: float = ANSWERED) -> Any:
    made = channel.unary_unary(
        method, request_serializer=type(asked).SerializeToString, response_deserializer=answer.FromString
    )
    return await made(asked, timeout=within, wait_for_ready=True)


def _digest(data: bytes) -> Any:
    return remote_execution_pb2.Digest(hash=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def _command() -> bytes:
    data: bytes = remote_execution_pb2.Command(arguments=["/bin/true"]).SerializeToString()
    return data


def _action() -> bytes:
    action = remote_execution_pb2.Action(
        command_digest=_digest(_command()), input_root_digest=_digest(b""), salt=os.urandom(16)
    )
    data: bytes = action.SerializeToString()
    return data


@asynccontextmanager
async def channels(address: str) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Open four connections to a server."""
    made = [
        grpc.aio.insecure_channel(address.removeprefix("grpc://"), options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]
    try:
        yield made
    finally:
        for channel in made:
            await channel.close()


async def measure(address: str, *, instance: str, workers: int, clients: int, seconds: float) -> Counts:
    """Load a server for this many seconds. Raises grpc.aio.AioRpcError if a call fails."""
    async with channels(address) as opened:
        return await Load(opened, instance).run(workers, clients, seconds)


async def wait(
    address: str, *, instance: str, streams: int, actions: int, pid: int, seconds: float
) -> dict[str, float]:
    """Open streams that wait for this many seconds. Raises grpc.aio.AioRpcError if a call fails."""
    async with channels(address) as opened:
        return await Streams(opened, instance, pid).run(streams, actions, seconds)


@click.command()
@click.argument("address")
@click.option("--instance", default="", help="As the server calls it.")
@click.option("--workers", default=50, help="Workers of one action each.")
@click.option("--clients", default=100, help="Clients, each with one action at a time.")
@click.option("--seconds", default=20.0, help="For how long it counts.")
@click.option("--streams", default=0, help="Open this many streams of WaitExecution instead.")
@click.option("--actions", default=1000, help="Actions for which they wait.")
@click.option("--pid", type=int, help="The server's process, with --streams.")
def main(
    address: str, instance: str, workers: int, clients: int, seconds: float, streams: int, actions: int, pid: int | None
) -> None:
    """Load the server at ADDRESS and print the figures as JSON."""
    if streams:
        if pid is None:
            raise click.UsageError("--streams takes --pid")
        waited = wait(address, instance=instance, streams=streams, actions=actions, pid=pid, seconds=seconds)
        print(json.dumps({name: round(each, 1) for name, each in asyncio.run(waited).items()}))
        return
    found = asyncio.run(measure(address, instance=instance, workers=workers, clients=clients, seconds=seconds))
    told: dict[str, Any] = {"actions_per_second": found.actions / seconds, "failed": found.failed}
    for name, values in (("first_p50_ms", found.first), ("done_p50_ms", found.done)):
        told[name] = statistics.median(values) * 1000 if values else None
    print(json.dumps({name: round(each, 1) if isinstance(each, float) else each for name, each in told.items()}))


if __name__ == "__main__":
    main()
