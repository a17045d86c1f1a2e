"""Settling many calls at one desk: together, or each alone, and what the tables say afterwards."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from bots.protocol import Sync
from bots.sync.call import Call, HeldCall, NewCall
from bots.sync.settle import SyncService
from schema import clock
from schema.errors import LeaseholdError
from tests.support.pool import Bot, Pool, active

#: What a call may change, by names that do not depend on when it was made.
TABLES = {
    "jobs": "SELECT public_id, state, fence, result_fence, attempts, kills, considered, reason FROM jobs ORDER BY id",
    "leases": "SELECT l.job_id, l.fence, b.name, l.state, l.units, l.strategy, l.assigner,"
    " l.delivered_at IS NOT NULL AS delivered FROM leases l JOIN bots b ON b.id = l.bot_id ORDER BY 1, 2",
    "events": "SELECT job_id, move, from_state, to_state, fence, actor, details FROM job_events ORDER BY job_id, id",
    "outputs": "SELECT job_id, fence, start, data FROM job_outputs ORDER BY 1, 2, 3",
    "localities": "SELECT b.name, l.hint FROM bot_localities l JOIN bots b ON b.id = l.bot_id ORDER BY 1, l.seq",
    "bots": "SELECT name, epoch, status, sync_seq, capacity, in_use, held, reserved FROM bots ORDER BY name",
    "quotas": "SELECT cohort, instance, usage FROM quotas ORDER BY 1, 2",
}


def new_calls(*messages: Sync) -> list[Call]:
    """Calls that have just come."""
    return [NewCall(message, clock.monotonic()) for message in messages]


def together(sync_service: SyncService, *messages: Sync) -> list[Any]:
    """Settle them in one call; answers are decoded, see `plain`."""
    return [plain(answer) for answer in sync_service.answer(new_calls(*messages))]


def alone(sync_service: SyncService, *messages: Sync) -> list[Any]:
    """Settle them one after the other; errors come back in their places."""
    return [plain(sync_service.answer(new_calls(message))[0]) for message in messages]


def plain(answer: bytes | HeldCall | LeaseholdError) -> Any:
    """An answer without the rest of its session, which no two clocks agree on; the code of a refusal; or "waits"."""
    if isinstance(answer, HeldCall):
        return "waits"
    if isinstance(answer, LeaseholdError):
        return getattr(answer, "code", None) or type(answer).__name__
    decoded = json.loads(answer)
    del decoded["expires_in"]
    return decoded


def tables(pool: Pool) -> dict[str, list[Any]]:
    """Everything that a call may change."""
    return {name: [tuple(row) for row in pool.rows(query)] for name, query in TABLES.items()}


def crew(
    pool: Pool, count: int, *, capacity: int = 1, sync_service: SyncService | None = None, **job: Any
) -> tuple[list[Bot], list[dict[str, Any]]]:
    """So many bots that are alike, each of which runs one job of one unit, and their leases."""
    sync_service = sync_service or pool.sync_service()
    bots, works = [], []
    for n in range(count):
        bots.append(pool.bot(f"bot-{n:02}", sync_service=sync_service))
        works.append(busied(pool, bots[-1], **job))
    for bot, work in zip(bots, works, strict=True):
        bot.sync(active(work), capacity=capacity)
    return bots, works


def busied(pool: Pool, bot: Bot, **job: Any) -> dict[str, Any]:
    """The bot is given a job, and runs it; nobody else has room for it."""
    pool.submit(**job)
    pool.assigner().run_once()
    (work,) = bot.take()
    return work


def offered(answer: dict[str, Any]) -> list[str]:
    """The jobs that the bot is to start."""
    return [lease["job"] for lease in answer["leases"] if lease["state"] == "pending"]


@contextmanager
def statements(pool: Pool) -> Iterator[Sequence[str]]:
    """What the desks of this pool send to the server meanwhile."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(pool.database.reserve, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(pool.database.reserve, "before_cursor_execute", note)
