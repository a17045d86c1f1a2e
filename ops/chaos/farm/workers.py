"""Workers of the Remote Workers API that do at once what an action says, and crash now and then."""

import random
import threading
from collections import Counter
from typing import Any

import grpc
from leasehold.errors import LeaseholdError

from bots.farm.client import Storage
from bots.farm.protos import remote_execution_pb2, remote_workers_pb2
from bots.farm.storage.upstream import Digest
from bots.farm.workers.leases import RESULT
from schema import clock

SERVICE = "/google.devtools.remoteworkers.v1test2.Bots/"
#: Leases of one worker at once; seconds for which a call may be held; seconds before a call that failed is repeated.
CAPACITY, HELD, AGAIN = 4, 15.0, 0.2
#: One of so many calls is followed by a crash; seconds until the worker is back, under its name.
CRASHES, BACK_AFTER = 100, 1.0
_LEASE, _STATUS = remote_workers_pb2.LeaseState, remote_workers_pb2.BotStatus
#: What buildbox-worker survives.
PASSES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Worker(threading.Thread):
    """One worker. happened: counts its crashes, and what would have ended buildbox-worker."""

    def __init__(self, address: str, name: str, chance: random.Random, happened: Counter[str]) -> None:
        super().__init__(name=name, daemon=True)
        self._address, self._chance, self._happened = address, chance, happened
        self._over = threading.Event()

    def stop(self) -> None:
        """End the worker as soon as its call is answered."""
        self._over.set()

    def run(self) -> None:
        """Work, in one session after the other."""
        with Storage(self._address) as storage:
            while not self._over.is_set():
                try:
                    self._serve(storage)
                except grpc.RpcError as error:
                    self._happened[f"ends of workers by {error.code().name}"] += 1
                clock.wait(self._over, BACK_AFTER)

    def _serve(self, storage: Storage) -> None:
        session = remote_workers_pb2.BotSession(bot_id=self.name, status=_STATUS.OK)
        session.worker.devices.add()
        session.worker.configs.add(key="capacity", value=str(CAPACITY))
        created = remote_workers_pb2.CreateBotSessionRequest(bot_session=session)
        session = self._call(storage, "CreateBotSession", created)
        while not self._over.is_set():
            for lease in session.leases:
                self._go_on(storage, lease)
            if self._chance.randrange(CRASHES) == 0:
                self._happened["crashes of workers"] += 1
                return
            update = remote_workers_pb2.UpdateBotSessionRequest(name=session.name, bot_session=session)
            session = self._call(storage, "UpdateBotSession", update)

    def _go_on(self, storage: Storage, lease: Any) -> None:
        if lease.state == _LEASE.PENDING:
            lease.state = _LEASE.ACTIVE
        elif lease.state == _LEASE.ACTIVE:
            try:
                told = done(storage, lease)
            except (grpc.RpcError, LeaseholdError):
                return  # the storage is away, and the next call will find the lease again
            lease.state, lease.status.code = _LEASE.COMPLETED, 0
            lease.result.type_url, lease.result.value = RESULT, told

    def _call(self, storage: Storage, method: str, asked: Any) -> Any:
        """Call until the answer comes, or an error that would end buildbox-worker."""
        while True:
            try:
                return storage.call(SERVICE + method, asked, remote_workers_pb2.BotSession, within=HELD)
            except grpc.RpcError as error:
                if error.code() not in PASSES or self._over.is_set():
                    raise
            clock.wait(self._over, AGAIN)


def done(storage: Storage, lease: Any) -> bytes:
    """Do what the action of a lease says, which is to print its last word; return the result as a message."""
    digest = remote_execution_pb2.Digest()
    lease.payload.Unpack(digest)
    action = remote_execution_pb2.Action.FromString(storage.download(Digest(digest.hash, digest.size_bytes)))
    named = action.command_digest
    command = remote_execution_pb2.Command.FromString(storage.download(Digest(named.hash, named.size_bytes)))
    result: bytes = remote_execution_pb2.ActionResult(stdout_raw=command.arguments[-1].encode()).SerializeToString()
    return result
