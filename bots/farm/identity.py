"""Who calls the door, which instance is meant, and how operations are called."""

import uuid
from dataclasses import dataclass

import grpc.aio
from leasehold.errors import Forbidden, NotFound
from leasehold.wire import escaped

from bots.gateway.middleware import TokenCache
from bots.gateway.workers import WorkerPool
from schema.requests import DEFAULT_INSTANCE
from schema.tenancy.tokens import Kind, Principal

#: What the actor of a job of the door begins with; after it comes the caller for whom it was submitted.
ACTOR = "farm:"


@dataclass(frozen=True)
class DoorCaller(Principal):
    """A caller for whom the door submits. Its actor is that of no token, so it marks the jobs of the door."""

    @property
    def actor(self) -> str:
        """The name of the caller in events, after that of the door."""
        return ACTOR + super().actor

    @classmethod
    def of(cls, caller: Principal) -> "DoorCaller":
        """Return the caller as one of the door."""
        return cls(**vars(caller))


class Identity:
    """Finds out who calls. anonymous: the instance of callers without a token; None = there are none."""

    def __init__(self, tokens: TokenCache, workers: WorkerPool, *, anonymous: str | None) -> None:
        self._tokens, self._workers, self._anonymous = tokens, workers, anonymous

    async def caller(self, context: grpc.aio.ServicerContext) -> DoorCaller:
        """Return who calls. Raises Unauthorised, and Forbidden for bots, which have no actions to run."""
        given = [str(value) for name, value in context.invocation_metadata() or () if name == "authorization"]
        if not given and self._anonymous is not None:
            return DoorCaller(kind=Kind.SUBMITTER, id="anonymous", instance=self._anonymous)
        found = await self._tokens.principal(given, self._workers)
        if found.kind is Kind.BOT:
            raise Forbidden("token: is for bots, which neither submit nor cancel actions")
        return DoorCaller.of(found)

    @staticmethod
    def instance(caller: Principal, given: str) -> str:
        """Return the instance that a client means. Raises Forbidden."""
        found = given or caller.instance or DEFAULT_INSTANCE
        if not caller.may_use_instance(found):
            raise Forbidden(f"instance_name: this caller may only use '{caller.instance}'")
        return found


def operation_name(instance: str, submission: str) -> str:
    """Return the name by which a client finds a submission again."""
    return f"{instance}/operations/{submission}"


def submission_of(name: str) -> str:
    """Return the id of the submission that an operation's name stands for. Raises NotFound."""
    try:
        return str(uuid.UUID(name.rpartition("/operations/")[2]))
    except ValueError:
        raise no_operation(name) from None


def no_operation(name: str) -> NotFound:
    """Return the error for a name that no operation has, at which clients send the action again."""
    return NotFound(f"name: there is no operation '{escaped(name, 120)}'")
