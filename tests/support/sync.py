"""Sync calls of many bots to one service, together or one by one, and the rows that they leave."""

import json
from typing import Any

from leasehold.errors import LeaseholdError

from bots.protocol import Sync
from bots.sync.call import Call, HeldCall, NewCall
from bots.sync.settle import SyncService
from schema import clock
from tests.support.pool import Bot, Pool, active

#: Queries of everything that a call may change, without columns that depend on its time.
TABLES = {
    "jobs": "SELECT public_id, state, fence, result_fence, attempts, kills, reason FROM jobs ORDER BY id",
    "leases": "SELECT l.job_id, l.fence, b.name, l.state, l.units, l.strategy, l.assigner,"
    " l.delivered_at IS NOT NULL AS delivered FROM leases l JOIN bots b ON b.id = l.bot_id ORDER BY 1, 2",
    "events": "SELECT job_id, move, from_state, to_state, fence, actor, details FROM job_events ORDER BY job_id, id",
    "outputs": "SELECT job_id, fence, start, data FROM job_outputs ORDER BY 1, 2, 3",
    "results": "SELECT job_id, fence, CAST(result AS text) FROM job_results ORDER BY 1",
    "checkpoints": "SELECT job_id, fence, CAST(checkpoint AS text) FROM job_checkpoints ORDER BY 1",
    "localities": "SELECT b.name, l.hint FROM bot_localities l JOIN bots b ON b.id = l.bot_id ORDER BY 1, l.seq",
    "bots": "SELECT name, epoch, status, sync_seq, capacity, in_use, held, kept_units FROM bots ORDER BY name",
    "quotas": "SELECT cohort, instance, usage FROM quotas ORDER BY 1, 2",
}


def new_calls(*messages: Sync) -> list[Call]:
    """Calls that have just arrived."""
    return [NewCall(message, clock.monotonic()) for message in messages]


def together(sync_service: SyncService, *messages: Sync) -> list[Any]:
    """Settle these messages in one call of the service; `plain` decodes the answers."""
    return [plain(answer) for answer in sync_service.answer(new_calls(*messages))]


def alone(sync_service: SyncService, *messages: Sync) -> list[Any]:
    """Settle these messages one by one; a refused one gives its error code instead of an answer."""
    return [plain(sync_service.answer(new_calls(message))[0]) for message in messages]


def plain(answer: bytes | HeldCall | LeaseholdError) -> Any:
    """A decoded answer without `expires_in`, which depends on time; the code of a refusal; or "waits" if held."""
    if isinstance(answer, HeldCall):
        return "waits"
    if isinstance(answer, LeaseholdError):
        return getattr(answer, "code", None) or type(answer).__name__
    decoded = json.loads(answer)
    del decoded["expires_in"]
    return decoded


def tables(pool: Pool) -> dict[str, list[Any]]:
    """Rows of everything that a call may change."""
    return {name: [tuple(row) for row in pool.rows(query)] for name, query in TABLES.items()}


def crew(
    pool: Pool, count: int, *, capacity: int = 1, sync_service: SyncService | None = None, **job: Any
) -> tuple[list[Bot], list[dict[str, Any]]]:
    """Make `count` equal bots that each run one job of one unit. Returns the bots and their leases."""
    sync_service = sync_service or pool.sync_service()
    bots, works = [], []
    for n in range(count):
        bots.append(pool.bot(f"bot-{n:02}", sync_service=sync_service))
        works.append(busied(pool, bots[-1], **job))
    for bot, work in zip(bots, works, strict=True):
        bot.sync(active(work), capacity=capacity)
    return bots, works


def busied(pool: Pool, bot: Bot, **job: Any) -> dict[str, Any]:
    """Let the bot run a new job; no other bot may have capacity for it. Returns the lease."""
    pool.submit(**job)
    pool.assigner().run_once()
    (work,) = bot.take()
    return work


def offered(answer: dict[str, Any]) -> list[str]:
    """Ids of the jobs that the bot must start."""
    return [lease["job"] for lease in answer["leases"] if lease["state"] == "pending"]
