"""The one call: what bots hold against what they should hold, settled for many of them in one transaction."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, TextClause, text

from bots import reports, visits
from bots.fetch import FetchSettings
from bots.protocol import OutputReport, SyncAnswer
from bots.refilling import refill
from bots.visits import Asked, Call, Visit, Waiting
from schema import moves, outputs
from schema.clock import Monotonic
from schema.engine import Database
from schema.errors import BadInput, Conflict, LeaseholdError
from schema.front import Fronts
from schema.ledger import EVICTION_COOLDOWN
from schema.moves import Word
from schema.states import BotStatus, JobState, LeaseState
from schema.timing import Timing
from schema.wakeups import wake

__all__ = ["Answer", "Asked", "Call", "Desk", "Waiting"]

Answer = bytes | Waiting

LOCK_BOTS = text("""
SELECT id, name, epoch, session, sync_seq, status, draining, closing, cohort, instance, pool,
    capacity, free, reserved, capacity - in_use - reserved AS room, kind
FROM bots WHERE name = ANY (CAST(:names AS text[])) ORDER BY id FOR NO KEY UPDATE
""")
STORED = text("""
SELECT a.bot_id, a.answer
FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:seqs AS bigint[])) AS s (bot_id, epoch, seq)
JOIN bot_answers a ON a.bot_id = s.bot_id AND a.epoch = s.epoch AND a.sync_seq = s.seq
""")
STORE = text("""
INSERT INTO bot_answers AS a (bot_id, epoch, sync_seq, answer)
SELECT * FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:seqs AS bigint[]),
                     CAST(:answers AS bytea[]))
ON CONFLICT (bot_id) DO UPDATE SET epoch = EXCLUDED.epoch, sync_seq = EXCLUDED.sync_seq, answer = EXCLUDED.answer
""")
HELD = text("""
SELECT l.bot_id, l.job_id, j.public_id, l.fence, l.state FROM leases l JOIN jobs j ON j.id = l.job_id
WHERE l.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND l.state IN ('pending', 'active', 'cancelling')
ORDER BY l.job_id
""")
# The payload travels until the bot has said that it has the lease.
DUE = text("""
SELECT l.bot_id, l.job_id, j.public_id, l.fence, l.state, i.name AS instance, j.attempts, j.timeout_seconds, p.payload,
    l.delivered_at IS NOT NULL AS delivered, CASE WHEN l.state = 'cancelling' THEN l.stop_reason END AS stop_reason
FROM leases l JOIN jobs j ON j.id = l.job_id JOIN instances i ON i.id = l.instance
LEFT JOIN job_payloads p ON p.job_id = l.job_id AND l.state = 'pending'
WHERE l.bot_id = ANY (CAST(:bot_ids AS bigint[])) AND l.state IN ('pending', 'active', 'cancelling')
ORDER BY l.job_id
""")


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
        self._fronts = Fronts(now)

    def answer(self, calls: Sequence[Call]) -> list[Answer | LeaseholdError]:
        """Settle calls of different bots together, in one transaction and a number of statements that does not depend
        on how many they are, but for those of bots that leave, keep room for evictors, or fetch near a maximum; an
        error is that of one call alone and has changed nothing.

        A call that waited is answered, and so is a new one unless there is no news and the bot would wait. An error is
        Conflict `session_over` (expired, closed, unknown), `session_superseded` (a newer session of that name is open)
        or `stale_seq` (a later call has been answered), or BadInput for a report that contradicts itself. Raises
        ValueError for two calls of one bot.
        """
        names = [visits.name(call) for call in calls]
        if len(set(names)) < len(names):
            raise ValueError("two calls of one bot cannot be settled together")
        return self._database.run(lambda connection: self._settle(connection, calls, names), urgent=True)

    def output(self, report: OutputReport) -> int:
        """Keep output of a running lease; returns the chunks written, 0 if the lease is not this bot's any more."""

        def work(connection: Connection) -> int:
            bot = connection.execute(LOCK_BOTS, {"names": [report.bot]}).one_or_none()
            bot = visits.check_session(bot, epoch=report.epoch, secret=report.secret)
            try:
                UUID(report.job)
            except ValueError:
                raise BadInput("job", "is not the id of a job") from None
            chunks = reports.written(bot.id, bot.epoch, report.job, report.fence, report.output)
            count = outputs.append(connection, chunks)
            if count:
                wake(connection, "done", [report.job])
            return count

        return self._database.run(work)

    def _settle(
        self, connection: Connection, calls: Sequence[Call], names: Sequence[str]
    ) -> list[Answer | LeaseholdError]:
        bots = {row.name: row for row in connection.execute(LOCK_BOTS, {"names": list(names)}).all()}
        found: dict[int, Answer | LeaseholdError] = {}
        settled: list[Visit] = []
        for nth, (call, name) in enumerate(zip(calls, names, strict=True)):
            try:
                settled.append(visits.let_in(nth, call, bots.get(name)))
            except Conflict as refusal:
                found[nth] = refusal
        settled = self._without_repeated(connection, settled, found)
        settled = self._compared(connection, settled, found)
        self._apply(connection, settled)
        settled = self._without_leaving(connection, settled, found)
        self._sync(connection, settled)
        refill(connection, settled, self._fetch, ack=self._timing.ack, cooldown=self.cooldown, fronts=self._fronts)
        self._reply(connection, settled, found)
        return [found[nth] for nth in range(len(calls))]

    def _without_repeated(
        self, connection: Connection, settled: list[Visit], found: dict[int, Answer | LeaseholdError]
    ) -> list[Visit]:
        """Answer what has been answered before, byte for byte; a call that still waits goes on waiting."""
        repeated = [visit for visit in settled if visit.seq == visit.bot.sync_seq]
        if not repeated:
            return settled
        keys = {
            "bot_ids": [visit.bot.id for visit in repeated],
            "epochs": [visit.bot.epoch for visit in repeated],
            "seqs": [visit.seq for visit in repeated],
        }
        stored = {row.bot_id: row.answer for row in connection.execute(STORED, keys)}
        for visit in repeated:
            answer: bytes | None = stored[visit.bot.id]
            if answer is not None:
                found[visit.nth] = zlib.decompress(answer)
            elif isinstance(visit.call, Asked):
                found[visit.nth] = _waiting(visit, visit.call)
        return [visit for visit in settled if visit.nth not in found]

    def _compared(
        self, connection: Connection, settled: list[Visit], found: dict[int, Answer | LeaseholdError]
    ) -> list[Visit]:
        """What each bot reports, against what it holds. Nothing has been written yet."""
        _gather(connection, HELD, [visit for visit in settled if visit.sync is not None], lambda visit: visit.held)
        for visit in settled:
            if visit.sync is None:
                continue
            try:
                visit.account = reports.compare(
                    visit.held,
                    visit.sync.leases,
                    bot_id=visit.bot.id,
                    epoch=visit.bot.epoch,
                    actor=visit.actor,
                    leaves=visit.leaves,
                )
            except BadInput as refusal:
                found[visit.nth] = refusal
        return [visit for visit in settled if visit.nth not in found]

    def _apply(self, connection: Connection, settled: Sequence[Visit]) -> None:
        """Acknowledgements, endings, and leases that a bot does not know of."""
        spoken = [visit for visit in settled if visit.sync is not None]
        starts = [start for visit in spoken for start in visit.account.started]
        endings = [(ending, visit.actor) for visit in spoken for ending in visit.account.endings]
        reserved = any(visit.bot.reserved for visit in spoken)
        leaving = sum(visit.leaves for visit in spoken)
        if reserved or bool(starts) + bool(endings) + leaving > 1:
            moves.hold(connection, [lease.job_id for visit in spoken for lease in visit.held])
        if reserved:
            moves.hold_quotas(connection, [visit.bot.id for visit in spoken])
        outputs.append(connection, [chunk for visit in spoken for chunk in visit.account.output])
        moves.acknowledge(connection, starts, sync=self._timing.sync)
        ended = moves.end(
            connection,
            [ending for ending, _ in endings],
            actor=[actor for _, actor in endings],
            pace=self._fetch.pace,
        )
        by_bot = {visit.bot.id: visit for visit in spoken}
        for job in ended:
            by_bot[job.bot_id].ended.append(job)
        hints = [
            (job.bot_id, job.locality_hint) for job in ended if job.state == JobState.SUCCEEDED and job.locality_hint
        ]
        moves.remember_localities(connection, hints, limit=self._fetch.bot_locality_hint_limit)

    def _without_leaving(
        self, connection: Connection, settled: list[Visit], found: dict[int, Answer | LeaseholdError]
    ) -> list[Visit]:
        for visit in settled:
            if visit.leaves:
                moves.close(connection, visit.bot.id, actor=visit.actor)
                answer = SyncAnswer(seq=visit.seq, leases=[], expires_in=0, sync_in=0)
                found[visit.nth] = answer.model_dump_json().encode()
        return [visit for visit in settled if not visit.leaves]

    def _sync(self, connection: Connection, settled: Sequence[Visit]) -> None:
        words = []
        for visit in settled:
            began = visit.call.began
            visit.before = self._now() - began
            said = visit.sync
            words.append(
                Word(visit.bot.id, visit.seq, visit.bot.status, None)
                if said is None
                else Word(visit.bot.id, visit.seq, said.status, said.capacity)
            )
        after = moves.synced(connection, words, ttl=self._timing.ttl)
        for visit in settled:
            visit.after = after[visit.bot.id]

    def _reply(
        self, connection: Connection, settled: Sequence[Visit], found: dict[int, Answer | LeaseholdError]
    ) -> None:
        """Say what each bot should have now, and keep it; a call without news that may wait is not answered yet."""
        _gather(connection, DUE, settled, lambda visit: visit.due)
        answers = {visit.nth: self._reply_to(visit) for visit in settled}
        moves.deliver(
            connection,
            [
                (lease.job_id, lease.fence)
                for visit in settled
                for lease in visit.due
                if lease.state == LeaseState.PENDING and not lease.delivered
            ],
        )
        if answers:
            kept = {
                "bot_ids": [visit.bot.id for visit in settled],
                "epochs": [visit.bot.epoch for visit in settled],
                "seqs": [visit.seq for visit in settled],
                "answers": [
                    None if isinstance(answer, Waiting) else zlib.compress(answer, 1) for answer in answers.values()
                ],
            }
            connection.execute(STORE, kept)
        found.update(answers)

    def _reply_to(self, visit: Visit) -> Answer:
        """The bot counts `expires_in` from when it sent the call."""
        call, synced = visit.call, visit.synced
        if isinstance(call, Asked) and call.sync.wait > 0 and not call.sync.leases and not visit.due:
            told_to_drain = synced.draining and call.sync.status == BotStatus.OK.value
            if not told_to_drain:
                return _waiting(visit, call)
        answer = SyncAnswer(
            seq=visit.seq,
            leases=[visits.work(row) for row in visit.due],
            drain=synced.draining,
            expires_in=max(0.0, synced.remaining + visit.before),
            sync_in=self._timing.sync,
        )
        return answer.model_dump_json(exclude_none=True).encode()


def _waiting(visit: Visit, call: Asked) -> Waiting:
    return Waiting(visit.bot.name, visit.bot.id, visit.bot.epoch, call.sync.seq, call.began)


def _gather(
    connection: Connection, query: TextClause, settled: Sequence[Visit], into: Callable[[Visit], list[Row[Any]]]
) -> None:
    """Add each row of the query to what its bot's visit keeps there."""
    if not settled:
        return
    by_bot = {visit.bot.id: into(visit) for visit in settled}
    for row in connection.execute(query, {"bot_ids": list(by_bot)}).all():
        by_bot[row.bot_id].append(row)
