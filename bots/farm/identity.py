"""Who calls the door, which instance is meant, and how operations are called."""

import uuid
from dataclasses import dataclass

import grpc.aio
from leasehold.errors import BadInput, Forbidden, NotFound, Unauthorised
from leasehold.wire import NAME_FORM, escaped

from bots.farm.settings import CertificateScope, FarmSettings
from bots.gateway.identity.bearers import TokenCache
from bots.gateway.workers import WorkerPool
from schema.requests import DEFAULT_INSTANCE
from schema.tenancy.tokens import Kind, Principal
from schema.validation import NAME

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
    """Finds out who calls: by a token, else by the certificate, else nobody by name where the settings permit it."""

    def __init__(self, tokens: TokenCache, workers: WorkerPool, settings: FarmSettings) -> None:
        self._tokens, self._workers, self._settings = tokens, workers, settings
        self._certified = {name: _holder(name, scope) for name, scope in settings.certificates.items()}

    async def principal(self, context: grpc.aio.ServicerContext) -> Principal:
        """Return who calls. Raises Unauthorised."""
        given = _tokens(context)
        if given:
            return await self._tokens.principal(given, self._workers)
        names = _common_names(context)
        if len(names) == 1 and names[0] in self._certified:
            return self._certified[names[0]]
        if self._settings.anonymous is not None:
            return Principal(kind=Kind.SUBMITTER, id="anonymous", instance=self._settings.anonymous)
        if names:
            named = escaped(", ".join(names), 80)
            raise Unauthorised(f"the certificate of '{named}' stands for nobody here: farm.certificates names others")
        return await self._tokens.principal(given, self._workers)

    async def caller(self, context: grpc.aio.ServicerContext) -> DoorCaller:
        """Return who calls for actions. Raises Unauthorised, and Forbidden for bots, which have none to run."""
        found = await self.principal(context)
        if found.kind is Kind.BOT:
            raise Forbidden("token: is for bots, which neither submit nor cancel actions")
        return DoorCaller.of(found)

    async def admit(self, context: grpc.aio.ServicerContext) -> None:
        """Let everybody of this machine, and who is known, use blobs and cached results. Raises Unauthorised.

        They are of no instance: who names a blob by its digest knows what is in it, or has been told of it.
        """
        if not self._settings.is_local:
            await self.principal(context)

    async def worker(self, context: grpc.aio.ServicerContext) -> Principal:
        """Return which worker calls. Raises Unauthorised, and Forbidden for who is no bot."""
        if self._settings.anonymous_workers and not (_tokens(context) or _common_names(context)):
            return Principal(kind=Kind.BOT, id="anonymous", bot="*")
        found = await self.principal(context)
        if found.kind is not Kind.BOT:
            raise Forbidden("token: is not for bots, and only they run actions")
        return found

    def called(self, given: str, field: str) -> str:
        """Return the name of the instance that a client or worker calls so; "" if it names none.

        Raises BadInput, naming `field`, for what is no name.
        """
        found = self._settings.instances.get(given, given)
        if found and not NAME.fullmatch(found):
            raise BadInput(field, f"'{escaped(found, 80)}' is not a name, nor one of farm.instances: {NAME_FORM}")
        return found

    def instance(self, caller: Principal, given: str) -> str:
        """Return the instance that a client means. Raises BadInput, and Forbidden."""
        found = self.called(given, "instance_name") or caller.instance or DEFAULT_INSTANCE
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


def _holder(name: str, scope: CertificateScope) -> Principal:
    return Principal(
        kind=Kind(scope.kind),
        id=f"certificate {name}",
        instance=scope.instance,
        bot=scope.bot,
        priority_ceiling=scope.priority_ceiling,
    )


def _common_names(context: grpc.aio.ServicerContext) -> list[str]:
    """The common names of the caller's certificate, which gRPC has verified; none if it has shown none."""
    return [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", ())]


def _tokens(context: grpc.aio.ServicerContext) -> list[str]:
    return [str(value) for name, value in context.invocation_metadata() or () if name == "authorization"]
