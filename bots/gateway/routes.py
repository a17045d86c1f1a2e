"""The bots' routes: sessions, the one sync call with its long poll, output between syncs."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.datastructures import State
from starlette.responses import Response

from bots.gateway import problems
from bots.gateway.long_poll import HeldSessions, KnownState
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.middleware import KINDS, MAX_BODY, bypass_framework
from bots.protocol import OpenSession, OutputReport, Session, Sync, SyncAnswer
from bots.sync import sessions
from bots.sync.call import Call, HeldCall, NewCall
from schema import clock
from schema.tenancy.tokens import Kind, Principal

#: Status in the metrics of a call whose client went away; nobody receives it.
HUNG_UP = 499
#: Waits of more than LONG seconds end together, on the next BEAT before they would; each beat costs a few transactions.
LONG, WAIT_ALIGNMENT = 5.0, 0.5

router = APIRouter(prefix="/v1", tags=["bots"])

_BOTS = {KINDS: [Kind.BOT.value]}
_PROBLEMS = problems.documented(400, 408, 409, 413, 415)


async def principal(request: Request) -> Principal:
    """The holder of this request's token; the door let it in."""
    found: Principal = request.state.principal
    return found


async def message(request: Request) -> Any:
    """What the door has read of the body: what the parameter `body` is annotated with."""
    return request.state.body


Caller = Annotated[Principal, Depends(principal)]
_Read = Depends(message)


@router.post(
    "/sessions",
    response_model=Session,
    responses=_PROBLEMS,
    openapi_extra=_BOTS | {MAX_BODY: 256 * 1024},
)
async def open_session(request: Request, body: Annotated[OpenSession, _Read], caller: Caller) -> Session:
    """A bot introduces itself. Its token must cover its name, and what it declares."""
    caller.check_session(
        body.bot, instance=body.instance, properties=body.properties, labels=body.labels, pool=body.pool
    )
    state = request.app.state
    session: Session = await state.bots.call(lambda: sessions.open_session(state.database, body, timing=state.timing))
    return session


@router.post(
    "/sync",
    response_model=SyncAnswer,
    responses=_PROBLEMS,
    openapi_extra=_BOTS,
)
@bypass_framework
async def sync(request: Request, body: Annotated[Sync, _Read], caller: Caller) -> Response:
    """The one call. An answer without news may be held back for `wait` seconds."""
    caller.check_bot(body.bot)
    state = request.app.state
    asked = NewCall(body, clock.monotonic())
    if body.wait == 0 or body.leases:
        return _synced(state.metrics, await _answered(state, asked), "at_once")
    held_sessions: HeldSessions = state.held_sessions
    async with state.polls.topic("bots", held_sessions.read_facts, run=state.bots.run).watch(request) as watch:
        answer = await state.batches.answer(asked)
        if isinstance(answer, bytes):
            return _synced(state.metrics, answer, "at_once")
        # A bot that is well and told to drain is never held.
        told = KnownState(answer.bot_id, answer.epoch, False if body.status == "ok" else None)
        watch.add(str(answer.bot_id), told.news)
        with held_sessions.renewing(told):
            await watch.wait(_aligned_wait(min(body.wait, state.max_wait), now=clock.monotonic()))
        if watch.gone:
            return _synced(state.metrics, b"", "hung_up")
        return _synced(state.metrics, await _answered(state, answer), "after_wait")


@router.post(
    "/output",
    status_code=204,
    responses=_PROBLEMS,
    openapi_extra=_BOTS,
)
async def output(request: Request, body: Annotated[OutputReport, _Read], caller: Caller) -> None:
    """Output of a running lease, between syncs."""
    caller.check_bot(body.bot)
    state = request.app.state
    await state.callers.call(lambda: state.sync_service.output(body))


def _aligned_wait(seconds: float, *, now: float) -> float:
    """Up to a beat less, so that waits that end at about the same time end at the same time."""
    return seconds - (now + seconds) % WAIT_ALIGNMENT if seconds > LONG else seconds


async def _answered(state: State, call: Call) -> bytes:
    """The answer to a call that is not held, or not any longer."""
    answer: bytes | HeldCall = await state.batches.answer(call)
    return answer if isinstance(answer, bytes) else await _answered(state, answer)


def _synced(metrics: GatewayMetrics, answer: bytes, outcome: str) -> Response:
    metrics.syncs.labels(outcome).inc()
    if outcome == "hung_up":
        return Response(status_code=HUNG_UP)
    return Response(answer, media_type="application/json")
