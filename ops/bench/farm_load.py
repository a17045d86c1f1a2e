"""Clients that send actions and read each stream to its end, and workers that end every action at once.

Both speak the public APIs only, so the server may be any. Each action is another one, by its salt. A worker reports a
lease as ACTIVE, as the API has it, and with the next call as COMPLETED with an empty result.

    python -m ops.bench.farm_load ADDRESS [--instance NAME] [--workers 50] [--clients 100] [--seconds 20]
"""

import asyncio
import hashlib
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import click
import grpc
import grpc.aio
from google.longrunning.operations_proto_pb2 import Operation

from bots.farm.protos import remote_execution_pb2, remote_workers_pb2

API = "/build.bazel.remote.execution.v2."
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
        """Return what was done within so many seconds, once all work."""
        await self._upload([_command(), b""])
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
            await self._upload([action])
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

    async def _upload(self, blobs: list[bytes]) -> None:
        one = remote_execution_pb2.BatchUpdateBlobsRequest.Request
        asked = remote_execution_pb2.BatchUpdateBlobsRequest(
            instance_name=self._instance, requests=[one(digest=_digest(each), data=each) for each in blobs]
        )
        method = API + "ContentAddressableStorage/BatchUpdateBlobs"
        await _call(self._channels[0], method, asked, remote_execution_pb2.BatchUpdateBlobsResponse)


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


async def measure(address: str, *, instance: str, workers: int, clients: int, seconds: float) -> Counts:
    """Load a server for so many seconds. Raises grpc.aio.AioRpcError if a call fails."""
    channels = [
        grpc.aio.insecure_channel(address.removeprefix("grpc://"), options=[("grpc.use_local_subchannel_pool", 1)])
        for _ in range(4)
    ]
    try:
        return await Load(channels, instance).run(workers, clients, seconds)
    finally:
        for channel in channels:
            await channel.close()


@click.command()
@click.argument("address")
@click.option("--instance", default="", help="As the server calls it.")
@click.option("--workers", default=50, help="Workers of one action each.")
@click.option("--clients", default=100, help="Clients, each with one action at a time.")
@click.option("--seconds", default=20.0, help="For how long it counts.")
def main(address: str, instance: str, workers: int, clients: int, seconds: float) -> None:
    """Load the server at ADDRESS and print the figures as JSON."""
    found = asyncio.run(measure(address, instance=instance, workers=workers, clients=clients, seconds=seconds))
    told: dict[str, Any] = {"actions_per_second": found.actions / seconds, "failed": found.failed}
    for name, values in (("first_p50_ms", found.first), ("done_p50_ms", found.done)):
        told[name] = statistics.median(values) * 1000 if values else None
    print(json.dumps({name: round(each, 1) if isinstance(each, float) else each for name, each in told.items()}))


if __name__ == "__main__":
    main()
