"""A scripted worker of the Remote Workers API, with the rules of buildbox-worker."""

from collections.abc import Sequence
from typing import Any

import grpc

from bots.farm.client import Keys, Storage
from bots.farm.protos import remote_execution_pb2, remote_workers_pb2
from bots.farm.storage.upstream import Digest
from bots.farm.workers.leases import RESULT
from tests.support.patience import MINUTE, eventually

SERVICE = "/google.devtools.remoteworkers.v1test2.Bots/"
State, Status = remote_workers_pb2.LeaseState, remote_workers_pb2.BotStatus


class Worker(Storage):
    """One worker: it keeps its session as the last answer says, and starts a lease when ACTIVE has been answered."""

    def __init__(self, address: str, name: str = "w1", *, token: str | None = None, parent: str = "", **config: Any):
        super().__init__(address, Keys(token=token))
        self.metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        self.parent, self.session = parent, remote_workers_pb2.BotSession(bot_id=name, status=Status.OK)
        device = self.session.worker.devices.add()
        for key, value in config.pop("properties", (("OSFamily", "linux"),)):
            device.properties.add(key=key, value=value)
        for key, value in config.items():
            self.session.worker.configs.add(key=key, value=str(value))

    def create(self) -> "Worker":
        asked = remote_workers_pb2.CreateBotSessionRequest(parent=self.parent, bot_session=self.session)
        self.session = self.begin("CreateBotSession", asked).result()
        return self

    def update(self, *, status: int | None = None, within: float = MINUTE, **more: Any) -> list[Any]:
        """Report the leases as they are and return those of the answer."""
        if status is not None:
            self.session.status = status  # type: ignore[assignment]  # the enum's values are numbers
        self.session = self.calling(within=within, **more).result()
        return list(self.session.leases)

    def calling(self, **more: Any) -> Any:
        """Begin a call that says what the session is now."""
        asked = remote_workers_pb2.UpdateBotSessionRequest(name=self.session.name, bot_session=self.session)
        return self.begin("UpdateBotSession", asked, **more)

    def begin(self, method: str, asked: Any, *, within: float = MINUTE) -> Any:
        made = self.channel.unary_unary(
            SERVICE + method,
            request_serializer=type(asked).SerializeToString,
            response_deserializer=remote_workers_pb2.BotSession.FromString,
        )
        return made.future(asked, timeout=within, metadata=self.metadata, wait_for_ready=True)

    def starts(self) -> Any:
        """Take the lease that the last answer offered, or the next one, and return it as the answer to ACTIVE says it.

        A held call may be answered for nothing, as when the session before it has just ended.
        """
        (offered,) = eventually(lambda: self.session.leases or self.update())
        assert offered.state == State.PENDING
        assert self.action(offered)
        offered.state = State.ACTIVE
        (running,) = self.update()
        assert (running.id, running.state) == (offered.id, State.ACTIVE)
        return running

    def ends(self, code: int = 0, message: str = "", *, state: int = State.COMPLETED, **result: Any) -> None:
        """Note the end of the only lease, which the next call reports."""
        (lease,) = self.session.leases
        lease.state, lease.status.code, lease.status.message = state, code, message  # type: ignore[assignment]
        if result:
            lease.result.type_url = RESULT
            lease.result.value = remote_execution_pb2.ActionResult(**result).SerializeToString()

    def action(self, lease: Any) -> bytes:
        """The action of a lease, as the storage has it."""
        digest = remote_execution_pb2.Digest()
        assert lease.payload.Unpack(digest)
        return self.download(Digest(digest.hash, digest.size_bytes))


def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call was refused."""
    error: Any = call.exception(MINUTE)
    assert error is not None, call.result()
    return error.code(), error.details()


def states(leases: Sequence[Any]) -> list[int]:
    return [each.state for each in leases]
