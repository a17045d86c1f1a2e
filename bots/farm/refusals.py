"""How calls that the door refuses end: the status of gRPC that each error means to clients, with its details."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc.aio
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode
from leasehold.errors import BadInput, Conflict, Forbidden, LeaseholdError, NotFound, NotReady, QueueFull, Unauthorised
from pydantic import ValidationError

from bots.farm.storage.passthrough import passed_on
from bots.farm.storage.trees import MOST_TOLD
from bots.farm.storage.upstream import Digest, Missing
from schema.fields import first_refusal

#: Trailing metadata in which an error's details travel.
DETAILS = "grpc-status-details-bin"
#: Seconds after which a client may try again what a full queue refused.
TRY_AGAIN = 5
_TYPES = "type.googleapis.com/"

_log = structlog.get_logger(__name__)


class Stopping(NotReady):
    """The door stops; clients wait again with the same name, at this door or another."""

    def __init__(self) -> None:
        super().__init__("the door stops: wait for the operation again")


def answering(handle: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a handler of single answers that ends calls with the status of what it raises."""

    @functools.wraps(handle)
    async def checked(request: bytes, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await handle(request, context)
        except Exception as error:
            await end(error, context)

    return checked


def streaming(handle: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Return a handler of streams that ends calls with the status of what it raises."""

    @functools.wraps(handle)
    async def checked(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for each in handle(request, context):
                yield each
        except Exception as error:
            await end(error, context)

    return checked


async def end(error: Exception, context: grpc.aio.ServicerContext) -> NoReturn:
    """End a call with the status that this error means to clients."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.AioRpcError):
        await passed_on(error, context)
    code, text, detail = _status(error)
    trailing: tuple[tuple[str, bytes], ...] = ()
    if detail is not None:
        packed = AnyMessage(type_url=f"{_TYPES}{detail.DESCRIPTOR.full_name}", value=detail.SerializeToString())
        status = status_pb2.Status(code=code.value[0], message=text, details=[packed])
        trailing = ((DETAILS, status.SerializeToString()),)
    await context.abort(code, text, trailing)
    raise AssertionError("abort raises")


def violations(missing: Sequence[Digest]) -> error_details_pb2.PreconditionFailure:
    """Return the detail of an error that names missing blobs, at which clients upload them and try again."""
    one = error_details_pb2.PreconditionFailure.Violation
    named = [one(type="MISSING", subject=f"blobs/{each}") for each in missing[:MOST_TOLD]]
    return error_details_pb2.PreconditionFailure(violations=named)


def _status(error: Exception) -> tuple[StatusCode, str, Any]:
    match error:
        case Missing():
            return StatusCode.FAILED_PRECONDITION, str(error), violations(error.digests)
        case ValidationError():
            return StatusCode.INVALID_ARGUMENT, first_refusal(error), None
        case BadInput():
            return StatusCode.INVALID_ARGUMENT, str(error), None
        case Unauthorised():
            return StatusCode.UNAUTHENTICATED, str(error), None
        case Forbidden():
            return StatusCode.PERMISSION_DENIED, str(error), None
        case NotFound():
            return StatusCode.NOT_FOUND, str(error), None
        case QueueFull():
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromSeconds(TRY_AGAIN)
            return StatusCode.RESOURCE_EXHAUSTED, str(error), retry
        case NotReady():
            return StatusCode.UNAVAILABLE, str(error), None
        case Conflict():
            return StatusCode.ABORTED, str(error), None
        case LeaseholdError():
            return StatusCode.FAILED_PRECONDITION, str(error), None
        case _:
            _log.exception("a call of a client failed", kind=type(error).__name__)
            return StatusCode.INTERNAL, "the door has failed; its log says why", None
