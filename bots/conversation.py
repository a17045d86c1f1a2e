"""The bots' routes: sessions, the one sync call with its long poll, output between syncs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from sqlalchemy import Connection, text
from starlette.datastructures import State
from starlette.responses import Response

from bots import problems, sessions
from bots.door import KINDS, MAX_BODY
from bots.leases import Desk, Waiting
from bots.metrics import GatewayMetrics
from bots.polls import News
from bots.protocol import OpenSession, OutputReport, Session, Sync, SyncAnswer
from schema.tokens import Kind, Principal

#: Status in the metrics of a call whose client went away; nobody receives it.
HUNG_UP = 499

router = APIRouter(prefix="/v1", tags=["bots"])

_BOTS = {KINDS: [Kind.BOT.value]}
_PROBLEMS = problems.documented(400, 408, 409, 413, 415)

# What could be news to a bot whose call is held: a lease it does not know, a stop, a drain, the end of its session.
BOT_NEWS = text("""
SELECT b.id, b.epoch, b.draining, b.status = 'gone' OR EXISTS (
    SELECT FROM leases l WHERE l.bot_id = b.id AND l.state IN ('pending', 'cancelling')) AS news
FROM bots b WHERE b.id = ANY (CAST(:ids AS bigint[]))
""")


@dataclass(frozen=True)
class BotFact:
    """What a look tells of one bot."""

    epoch: int
    draining: bool
    news: bool


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
async def sync(request: Request, body: Annotated[Sync, _Read], caller: Caller) -> Response:
    """The one call. An answer without news may be held back for `wait` seconds."""
    caller.check_bot(body.bot)
    state = request.app.state
    desk: Desk = state.desk
    if body.wait == 0:
        answer = await state.bots.call(lambda: desk.sync(body))
        return _synced(state.metrics, answer if isinstance(answer, bytes) else await _settled(state, answer), "at_once")
    async with state.polls.topic("bots", bot_news, run=state.bots.run).watch(request) as watch:
        answer = await state.bots.call(lambda: desk.sync(body))
        if isinstance(answer, bytes):
            return _synced(state.metrics, answer, "at_once")
        told = False if body.status == "ok" else None  # a bot that is well and told to drain is never held
        watch.add(str(answer.bot_id), _news_to(answer, told=told))
        await watch.wait(min(answer.seconds, state.max_wait))
        if watch.gone:
            return _synced(state.metrics, b"", "hung_up")
        return _synced(state.metrics, await _settled(state, answer), "after_wait")


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
    await state.callers.call(lambda: state.desk.output(body))


def bot_news(connection: Connection, keys: Sequence[str]) -> Mapping[str, BotFact]:
    """What there is to tell the bots with these row ids."""
    rows = connection.execute(BOT_NEWS, {"ids": [int(key) for key in keys]})
    return {str(row.id): BotFact(row.epoch, row.draining, row.news) for row in rows}


def _news_to(waiting: Waiting, *, told: bool | None) -> News:
    """Whether a fact is news to the bot. `told`: what it knows of being drained; None = as the first look says."""
    known = [] if told is None else [told]

    def news(fact: BotFact) -> bool:
        if not known:
            known.append(fact.draining)
        return fact.news or fact.epoch != waiting.epoch or fact.draining != known[0]

    return news


async def _settled(state: State, waiting: Waiting) -> bytes:
    desk: Desk = state.desk
    return await state.bots.call(lambda: desk.settle(waiting))  # type: ignore[no-any-return]


def _synced(metrics: GatewayMetrics, answer: bytes, outcome: str) -> Response:
    metrics.syncs.labels(outcome).inc()
    if outcome == "hung_up":
        return Response(status_code=HUNG_UP)
    return Response(answer, media_type="application/json")
