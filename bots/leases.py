"""The one call: what a bot holds against what it should hold, settled in one transaction."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, text

from bots import reports
from bots.fetch import FetchSettings, fetch
from bots.protocol import OutputReport, Sync, SyncAnswer, Work
from bots.sessions import digest
from schema import moves, outputs
from schema.clock import Monotonic
from schema.engine import Database
from schema.errors import BadInput, Conflict
from schema.fetching import Fetcher
from schema.ledger import EVICTION_COOLDOWN
from schema.moves import Ended, Placement, Synced
from schema.states import BotStatus, JobState, LeaseState
from schema.timing import Timing
from schema.wakeups import wake

LOCK_BOT = text("""
SELECT id, name, epoch, session, sync_seq, status, draining, closing, cohort, instance, pool,
    capacity, free, reserved, capacity - in_use - reserved AS room
FROM bots WHERE name = :name FOR NO KEY UPDATE
""")
STORED = text("SELECT answer FROM bot_answers WHERE bot_id = :bot_id AND epoch = :epoch AND sync_seq = :seq")
STORE = text("""
INSERT INTO bot_answers AS a (bot_id, epoch, sync_seq, answer) VALUES (:bot_id, :epoch, :seq, :answer)
ON CONFLICT (bot_id) DO UPDATE SET epoch = EXCLUDED.epoch, sync_seq = EXCLUDED.sync_seq, answer = EXCLUDED.answer
""")
# The payload travels until the bot has said that it has the lease.
HELD = text("""
SELECT l.job_id, j.public_id, l.fence, l.state, i.name AS instance, j.attempts, j.timeout_seconds, p.payload,
    l.delivered_at IS NOT NULL AS delivered, CASE WHEN l.state = 'cancelling' THEN l.stop_reason END AS stop_reason
FROM leases l JOIN jobs j ON j.id = l.job_id JOIN instances i ON i.id = l.instance
LEFT JOIN job_payloads p ON p.job_id = l.job_id AND l.state = 'pending'
WHERE l.bot_id = :bot_id AND l.state IN ('pending', 'active', 'cancelling')
ORDER BY l.job_id
""")


@dataclass(frozen=True)
class Waiting:
    """A sync without news: the answer may be held back for `seconds`, or until a wake-up for the bot arrives."""

    bot: str
    bot_id: int
    epoch: int
    seq: int
    began: float
    seconds: float


class Desk:
    """Where bots synchronise. Stateless between calls: any process may answer any of them."""

    def __init__(
        self,
        database: Database,
        *,
        timing: Timing,
        fetch: FetchSettings,
        now: Monotonic,
        cooldown: float = EVICTION_COOLDOWN,
    ) -> None:
        self._database, self._timing, self._fetch, self._now = database, timing, fetch, now
        self.cooldown = cooldown

    def sync(self, sync: Sync) -> bytes | Waiting:
        """Settle one call and return the answer's JSON, or Waiting if there is no news and the bot would wait.

        Raises Conflict `session_over` (expired, closed, unknown), `session_superseded` (a newer session of that name
        is open) or `stale_seq` (a later call has been answered).
        """
        began = self._now()
        return self._database.run(lambda connection: self._sync(connection, sync, began), urgent=True)

    def settle(self, waiting: Waiting) -> bytes:
        """The answer to a call that waited; the same errors as `sync`. Answers a call only once."""
        return self._database.run(lambda connection: self._settle(connection, waiting), urgent=True)

    def output(self, report: OutputReport) -> int:
        """Keep output of a running lease; returns the chunks written, 0 if the lease is not this bot's any more."""

        def work(connection: Connection) -> int:
            bot = connection.execute(LOCK_BOT, {"name": report.bot}).one_or_none()
            _check_session(bot, epoch=report.epoch, secret=report.secret)
            assert bot is not None
            try:
                UUID(report.job)
            except ValueError:
                raise BadInput("job", "is not the id of a job") from None
            chunks = reports.written(report.job, report.fence, report.output)
            count = outputs.append(connection, chunks, bot_id=bot.id, epoch=bot.epoch)
            if count:
                wake(connection, "done", [report.job])
            return count

        return self._database.run(work)

    def _sync(self, connection: Connection, sync: Sync, began: float) -> bytes | Waiting:
        bot = connection.execute(LOCK_BOT, {"name": sync.bot}).one_or_none()
        _check_session(bot, epoch=sync.epoch, secret=sync.secret)
        assert bot is not None
        if sync.seq < bot.sync_seq:
            raise Conflict("stale_seq", "a later call of this session has been answered")
        wait = min(sync.wait, self._timing.ttl / 3)
        if sync.seq == bot.sync_seq:
            stored: bytes | None = connection.execute(
                STORED, {"bot_id": bot.id, "epoch": bot.epoch, "seq": sync.seq}
            ).scalar_one()
            return stored or Waiting(sync.bot, bot.id, bot.epoch, sync.seq, began, wait)
        ended = self._apply(connection, bot, sync)
        if sync.status == BotStatus.GONE.value:
            moves.close(connection, bot.id, actor=f"bot:{sync.bot}")
            return SyncAnswer(seq=sync.seq, leases=[], expires_in=0, sync_in=0).model_dump_json().encode()
        before = self._now() - began
        synced = moves.synced(
            connection, bot.id, seq=sync.seq, status=sync.status, capacity=sync.capacity, ttl=self._timing.ttl
        )
        self._refill(connection, bot, synced, ended)
        held = connection.execute(HELD, {"bot_id": bot.id}).all()
        told_to_drain = synced.draining and sync.status == BotStatus.OK.value
        if wait > 0 and not sync.leases and not held and not told_to_drain:
            self._store(connection, bot.id, epoch=bot.epoch, seq=sync.seq, answer=None)
            return Waiting(sync.bot, bot.id, bot.epoch, sync.seq, began, wait)
        return self._answer(connection, bot, sync.seq, held, synced, before=before)

    def _settle(self, connection: Connection, waiting: Waiting) -> bytes:
        bot = connection.execute(LOCK_BOT, {"name": waiting.bot}).one_or_none()
        _check_epoch(bot, epoch=waiting.epoch)
        assert bot is not None
        if bot.sync_seq != waiting.seq:
            raise Conflict("stale_seq", "a later call of this session has been answered")
        key = {"bot_id": bot.id, "epoch": bot.epoch, "seq": waiting.seq}
        stored: bytes | None = connection.execute(STORED, key).scalar_one()
        if stored:
            return stored
        before = self._now() - waiting.began
        synced = moves.synced(
            connection, bot.id, seq=waiting.seq, status=bot.status, capacity=None, ttl=self._timing.ttl
        )
        held = connection.execute(HELD, {"bot_id": bot.id}).all()
        return self._answer(connection, bot, waiting.seq, held, synced, before=before)

    def _apply(self, connection: Connection, bot: Row[Any], sync: Sync) -> list[Ended]:
        """What the bot reports, against what it holds: acknowledgements, endings, and leases it does not know of."""
        held = connection.execute(HELD, {"bot_id": bot.id}).all()
        if bot.reserved:
            moves.hold(connection, [lease.job_id for lease in held])
            moves.hold_quotas(connection, bot.id)
        if not held:
            return []
        actor = f"bot:{sync.bot}"
        leaves = sync.status == BotStatus.GONE.value
        account = reports.compare(held, sync.leases, bot_id=bot.id, epoch=bot.epoch, leaves=leaves)
        outputs.append(connection, account.output, bot_id=bot.id, epoch=bot.epoch)
        if not bot.reserved and bool(account.started) + bool(account.endings) + leaves > 1:
            moves.hold(connection, [lease.job_id for lease in held])
        moves.acknowledge(
            connection, account.started, bot_id=bot.id, epoch=bot.epoch, sync=self._timing.sync, actor=actor
        )
        ended = moves.end(connection, account.endings, actor=actor, pace=self._fetch.pace)
        hints = [job.locality_hint for job in ended if job.state == JobState.SUCCEEDED and job.locality_hint]
        moves.remember_localities(connection, bot.id, hints, limit=self._fetch.bot_locality_hint_limit)
        return ended

    def _refill(self, connection: Connection, bot: Row[Any], synced: Synced, ended: list[Ended]) -> None:
        """Fetch for the bot; what room it still has and had not before is for the assigners, also for jobs at rest."""
        if synced.reserved:
            self._claim(connection, bot, synced)
        if not synced.free:
            return
        fetched = fetch(
            connection,
            self._fetch,
            bot=Fetcher(
                bot.id,
                bot.name,
                bot.cohort,
                bot.instance,
                bot.pool,
                bot.capacity,
                synced.room,
                returned=sorted({job.instance for job in ended}),
            ),
            completed=sum(job.verdict in reports.COMPLETED for job in ended),
            ack=self._timing.ack,
            cooldown=self.cooldown,
        )
        room = synced.room - sum(lease.units for lease in fetched)
        if room <= 0:
            return
        if synced.room > bot.room or not bot.free:
            moves.release(connection, bot_id=bot.id, room=room, limit=moves.RELEASE_LIMIT)
            wake(connection, "jobs")
        elif any(job.state == JobState.QUEUED for job in ended):
            wake(connection, "jobs")

    def _claim(self, connection: Connection, bot: Row[Any], synced: Synced) -> None:
        """Start the jobs for which an eviction has freed room here; this transaction holds their quotas."""
        ids = moves.claims(connection, bot.id, room=synced.room + synced.reserved)
        placements = [Placement(job_id, bot.id, {"bot": bot.name, "strategy": "preemption"}) for job_id in ids]
        moves.grant(
            connection,
            placements,
            assigner=f"bot:{bot.name}",
            strategy="preemption",
            ack=self._timing.ack,
            tell=False,
            again=True,
            cooldown=self.cooldown,
        )

    def _answer(
        self,
        connection: Connection,
        bot: Row[Any],
        seq: int,
        held: Sequence[Row[Any]],
        synced: Synced,
        *,
        before: float,
    ) -> bytes:
        """Write the answer down and give it. The bot counts `expires_in` from when it sent the call; `before` are the
        seconds that had surely passed since then when the rest of its session was measured."""
        moves.deliver(
            connection,
            [
                (lease.job_id, lease.fence)
                for lease in held
                if lease.state == LeaseState.PENDING and not lease.delivered
            ],
        )
        answer = SyncAnswer(
            seq=seq,
            leases=[_work(row) for row in held],
            drain=synced.draining,
            expires_in=max(0.0, synced.remaining + before),
            sync_in=self._timing.sync,
        )
        body = answer.model_dump_json(exclude_none=True).encode()
        self._store(connection, bot.id, epoch=bot.epoch, seq=seq, answer=body)
        return body

    def _store(self, connection: Connection, bot_id: int, *, epoch: int, seq: int, answer: bytes | None) -> None:
        connection.execute(STORE, {"bot_id": bot_id, "epoch": epoch, "seq": seq, "answer": answer})


def _check_session(bot: Row[Any] | None, *, epoch: int, secret: str) -> None:
    _check_epoch(bot, epoch=epoch)
    assert bot is not None
    if not hmac.compare_digest(bot.session, digest(secret)):
        raise Conflict("session_over", "this session is over: open a new one")


def _check_epoch(bot: Row[Any] | None, *, epoch: int) -> None:
    if bot is None or bot.session is None or bot.closing:
        raise Conflict("session_over", "this session is over: open a new one")
    if bot.epoch != epoch:
        raise Conflict("session_superseded", "a newer session of this bot is open")


def _work(row: Row[Any]) -> Work:
    payload: Mapping[str, Any] | None = row.payload
    return Work(
        job=str(row.public_id),
        fence=row.fence,
        state=row.state,
        stop_reason=row.stop_reason,
        instance=row.instance,
        attempt=row.attempts,
        timeout=row.timeout_seconds,
        payload=None if payload is None else dict(payload),
    )
