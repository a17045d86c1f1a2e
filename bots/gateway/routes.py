"""The routes for bots: opening a session, the sync call with its long poll, and output between syncs."""

from contextlib import nullcontext
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.datastructures import State
from starlette.responses import Response

from bots.gateway import problems
from bots.gateway.held_calls import HeldSessions, KnownState, NewestCalls
from bots.gateway.long_poll import LongPoll
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.middleware import KINDS, MAX_BODY, bypass_framework
from bots.gateway.workers import SessionOpener
from bots.protocol import AskInputs, Inputs, OpenSession, OutputReport, Session, Sync, SyncAnswer
from bots.sync.call import Call, HeldCall, NewCall
from schema import clock
from schema.tenancy.tokens import Kind, Principal

#: Status in the metrics of a call whose client hung up; it is never received.
HUNG_UP = 499
#: Waits of more than LONG seconds end early, at a multiple of WAIT_ALIGNMENT seconds. Many waits then end together, and
#: their calls share a few transactions. A shorter wait relies on wake-ups alone: what one has missed, and the renewal
#: of the session, are left to the bot's next call. So the leases of bots that run jobs are read at their calls only.
LONG, WAIT_ALIGNMENT = 5.0, 0.5

router = APIRouter(prefix="/v1", tags=["bots"])

_BOTS = {KINDS: [Kind.BOT.value]}
_PROBLEMS = problems.documented(400, 408, 409, 413, 415)


async def principal(request: Request) -> Principal:
    """Return the holder of this request's token, which the middleware has verified."""
    found: Principal = request.state.principal
    return found


async def message(request: Request) -> Any:
    """Return the body that the middleware has parsed: an object of the annotated type of the parameter `body`."""
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
    """Open a session for a bot. Its token must permit its name and what it declares."""
    caller.check_session(
        body.bot, instance=body.instance, properties=body.properties, labels=body.labels, pool=body.pool
    )
    state = request.app.state
    opener: SessionOpener = state.opener
    return await opener.open(body)


@router.post(
    "/sync",
    response_model=SyncAnswer,
    responses=_PROBLEMS,
    openapi_extra=_BOTS,
)
@bypass_framework
async def sync(request: Request, body: Annotated[Sync, _Read], caller: Caller) -> Response:
    """Take a bot's report and return the leases it should have; may hold an answer without news."""
    caller.check_bot(body.bot)
    state = request.app.state
    asked, session = NewCall(body, clock.monotonic()), (body.bot, body.secret)
    newest_calls: NewestCalls = state.newest_calls
    if body.wait == 0:
        newest_calls.came(session, body.seq)
        return _synced(state.metrics, await _answered(state, asked), "at_once")
    topic = state.polls.topic("bots", state.held_sessions.read_facts, run=state.bots.run)
    async with topic.watch(request.state.hang_up) as watch:
        with newest_calls.holding(session, body.seq, watch):
            return await _held(state, asked, watch)


@router.post(
    "/output",
    status_code=204,
    responses=_PROBLEMS,
    openapi_extra=_BOTS,
)
async def output(request: Request, body: Annotated[OutputReport, _Read], caller: Caller) -> None:
    """Store output and checkpoint of a running lease, between syncs."""
    caller.check_bot(body.bot)
    state = request.app.state
    await state.callers.call(lambda: state.sync_service.output(body))


@router.post(
    "/inputs",
    response_model=Inputs,
    responses=_PROBLEMS,
    openapi_extra=_BOTS,
)
async def inputs(request: Request, body: Annotated[AskInputs, _Read], caller: Caller) -> Inputs:
    """Return the results of nodes on which the node of a lease depends."""
    caller.check_bot(body.bot)
    state = request.app.state
    found: dict[str, Any] = await state.callers.call(lambda: state.sync_service.inputs(body))
    return Inputs(results=found)


def _aligned_wait(seconds: float, *, now: float) -> float:
    """Shorten a long wait to end at a multiple of WAIT_ALIGNMENT, so that waits end together."""
    return seconds - (now + seconds) % WAIT_ALIGNMENT if seconds > LONG else seconds


async def _held(state: State, asked: NewCall, watch: LongPoll) -> Response:
    """Answer a call, but hold the answer for as long as the bot is willing to wait if there is no news."""
    answer = await state.batches.answer(asked, bot=asked.sync.bot)
    if isinstance(answer, bytes):
        return _synced(state.metrics, answer, "at_once")
    held_sessions: HeldSessions = state.held_sessions
    told = KnownState(answer.bot_id, answer.epoch, answer.drain, answer.expires)
    watch.add(str(answer.bot_id), told.news)
    now = clock.monotonic()
    # The bot counts from the sending of its call, and gives it up soon after that.
    seconds = _aligned_wait(min(asked.sync.wait, state.max_wait) - (now - asked.began), now=now)
    with held_sessions.renewing(told) if seconds > LONG else nullcontext():
        noticed = await watch.wait(seconds)
    if watch.gone:
        return _synced(state.metrics, b"", "hung_up")
    if watch.replaced or (not noticed and held_sessions.lasts(told)):
        unchanged = state.sync_service.unchanged(answer, drain=told.draining, expires=told.expires)
        return _synced(state.metrics, unchanged, "replaced" if watch.replaced else "after_wait")
    return _synced(state.metrics, await _answered(state, answer), "after_wait")


async def _answered(state: State, call: Call) -> bytes:
    """Answer a call without holding it, or after it was held."""
    bot = call.sync.bot if isinstance(call, NewCall) else call.bot
    answer: bytes | HeldCall = await state.batches.answer(call, bot=bot)
    return answer if isinstance(answer, bytes) else await _answered(state, answer)


def _synced(metrics: GatewayMetrics, answer: bytes, outcome: str) -> Response:
    metrics.syncs.labels(outcome).inc()
    if outcome == "hung_up":
        return Response(status_code=HUNG_UP)
    return Response(answer, media_type="application/json")
