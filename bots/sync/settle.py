"""The one call: what bots hold against what they should hold, settled for many of them in one transaction."""

import zlib
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import Connection, text

from bots.protocol import OutputReport, SyncAnswer
from bots.sync import call as call_sync
from bots.sync.call import Asked, Call, Visit, Waiting
from bots.sync.fetch import FetchSettings, refill
from schema import outputs
from schema.accounting.quotas import EVICTION_COOLDOWN
from schema.clock import Monotonic
from schema.errors import BadInput, Conflict, LeaseholdError
from schema.moves.acknowledge import acknowledge, deliver, hold
from schema.moves.end import end
from schema.moves.preempt import hold_quotas
from schema.moves.sessions import Word, close, remember_localities, synced
from schema.picking.head_cursor import Fronts
from schema.postgres.engine import Database
from schema.postgres.fragments import newest
from schema.postgres.notify import wake
from schema.predicates import GATED, at_work
from schema.states import BotStatus, JobState, LeaseState
from schema.timing import Timing

Answer = bytes | Waiting

# Names are looked up without a lock, so that the locks come in the order of ids.
LOCK_BOTS = text(f"""
WITH named AS MATERIALIZED (
    SELECT f.id FROM unnest(CAST(:names AS text[])) AS n (name)
    CROSS JOIN LATERAL {newest("bots", "name", "n.name", columns="id")} f ORDER BY f.id
)
SELECT b.id, b.name, b.epoch, b.session, b.sync_seq, b.status, b.draining, b.closing, b.cohort, b.instance, b.pool,
    b.capacity, b.in_use, b.held, b.free, b.reserved, b.kind,
    CASE WHEN :fetches AND EXISTS (SELECT FROM jobs WHERE {GATED})
        THEN EXISTS (SELECT FROM assigners a WHERE {at_work("a")}) END AS gated
FROM named CROSS JOIN LATERAL {newest("bots", "id", "named.id", lock="FOR NO KEY UPDATE")} b
""")
STORED = text("""
SELECT a.bot_id, a.answer
FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:seqs AS bigint[])) AS s (bot_id, epoch, seq)
JOIN bot_answers a ON a.bot_id = s.bot_id AND a.epoch = s.epoch AND a.sync_seq = s.seq
""")
# A call that waited may be answered later under its own number.
STORE = text("""
WITH said AS MATERIALIZED (
    SELECT * FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:before AS bigint[]),
                         CAST(:seqs AS bigint[]), CAST(:answers AS bytea[]))
        AS s (bot_id, epoch, before, sync_seq, answer)
), old AS MATERIALIZED (
    SELECT a.place FROM said s CROSS JOIN LATERAL (
        SELECT ctid AS place FROM bot_answers
        WHERE bot_id = s.bot_id AND epoch = s.epoch AND sync_seq = s.before OFFSET 0) a
    WHERE s.before < s.sync_seq
), gone AS (
    DELETE FROM bot_answers a USING old o WHERE a.ctid = o.place
)
INSERT INTO bot_answers AS a (bot_id, epoch, sync_seq, answer) SELECT bot_id, epoch, sync_seq, answer FROM said
ON CONFLICT (bot_id, epoch, sync_seq) DO UPDATE SET answer = EXCLUDED.answer
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
        names = [call_sync.name(call) for call in calls]
        if len(set(names)) < len(names):
            raise ValueError("two calls of one bot cannot be settled together")
        return self._database.run(
            lambda connection: self._settle(connection, calls, names), urgent=True, undone=self._fronts.forget
        )

    def output(self, report: OutputReport) -> int:
        """Keep output of a running lease; returns the chunks written, 0 if the lease is not this bot's any more."""

        def work(connection: Connection) -> int:
            bot = connection.execute(LOCK_BOTS, {"names": [report.bot], "fetches": False}).one_or_none()
            bot = call_sync.check_session(bot, epoch=report.epoch, secret=report.secret)
            try:
                UUID(report.job)
            except ValueError:
                raise BadInput("job", "is not the id of a job") from None
            chunks = call_sync.written(bot.id, bot.epoch, report.job, report.fence, report.output)
            count = outputs.append(connection, chunks)
            if count:
                wake(connection, "done", [report.job])
            return count

        return self._database.run(work)

    def _settle(
        self, connection: Connection, calls: Sequence[Call], names: Sequence[str]
    ) -> list[Answer | LeaseholdError]:
        fetches = self._fetch.to_capacity or any(call_sync.ends_something(call) for call in calls)
        asked = {"names": list(names), "fetches": fetches and self._fetch.enabled}
        bots = {row.name: row for row in connection.execute(LOCK_BOTS, asked).all()}
        found: dict[int, Answer | LeaseholdError] = {}
        settled: list[Visit] = []
        for nth, (call, name) in enumerate(zip(calls, names, strict=True)):
            try:
                settled.append(call_sync.let_in(nth, call, bots.get(name)))
            except Conflict as refusal:
                found[nth] = refusal
        settled = self._without_repeated(connection, settled, found)
        settled = self._compared(connection, settled, found)
        self._apply(connection, settled)
        settled = self._without_leaving(connection, settled, found)
        refill(connection, settled, self._fetch, ack=self._timing.ack, cooldown=self.cooldown, fronts=self._fronts)
        self._sync(connection, settled)
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
        call_sync.held(connection, [visit for visit in settled if visit.sync is not None])
        for visit in settled:
            if visit.sync is None:
                continue
            try:
                visit.account = call_sync.compare(
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
            hold(connection, [lease.job_id for visit in spoken for lease in visit.held])
        if reserved:
            hold_quotas(connection, [visit.bot.id for visit in spoken])
        outputs.append(connection, [chunk for visit in spoken for chunk in visit.account.output])
        acknowledge(connection, starts, sync=self._timing.sync)
        ended = end(
            connection,
            [ending for ending, _ in endings],
            actor=[actor for _, actor in endings],
            pace=self._fetch.pace,
            rooms={visit.bot.id: visit.room for visit in spoken},
        )
        by_bot = {visit.bot.id: visit for visit in spoken}
        for job in ended:
            by_bot[job.bot_id].ended.append(job)
        hints = [
            (job.bot_id, job.locality_hint) for job in ended if job.state == JobState.SUCCEEDED and job.locality_hint
        ]
        remember_localities(connection, hints, limit=self._fetch.bot_locality_hint_limit)
        for visit in spoken:
            visit.size()

    def _without_leaving(
        self, connection: Connection, settled: list[Visit], found: dict[int, Answer | LeaseholdError]
    ) -> list[Visit]:
        self._sync(connection, [visit for visit in settled if visit.leaves])
        for visit in settled:
            if visit.leaves:
                close(connection, visit.bot.id, actor=visit.actor)
                answer = SyncAnswer(seq=visit.seq, leases=[], expires_in=0, sync_in=0)
                found[visit.nth] = answer.model_dump_json().encode()
        return [visit for visit in settled if not visit.leaves]

    def _sync(self, connection: Connection, settled: Sequence[Visit]) -> None:
        """The one time that a call writes its bot's row."""
        for visit in settled:
            visit.before = self._now() - visit.call.began
        words = [Word(visit.bot.id, visit.seq, visit.status, visit.room) for visit in settled]
        remaining = synced(connection, words, ttl=self._timing.ttl)
        for visit in settled:
            visit.remaining = remaining[visit.bot.id]

    def _reply(
        self, connection: Connection, settled: Sequence[Visit], found: dict[int, Answer | LeaseholdError]
    ) -> None:
        """Say what each bot should have now, and keep it; a call without news that may wait is not answered yet."""
        call_sync.due(connection, settled)
        answers = {visit.nth: self._reply_to(visit) for visit in settled}
        deliver(
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
                "before": [visit.bot.sync_seq for visit in settled],
                "seqs": [visit.seq for visit in settled],
                "answers": [
                    None if isinstance(answer, Waiting) else zlib.compress(answer, 1) for answer in answers.values()
                ],
            }
            connection.execute(STORE, kept)
        found.update(answers)

    def _reply_to(self, visit: Visit) -> Answer:
        """The bot counts `expires_in` from when it sent the call."""
        call = visit.call
        if isinstance(call, Asked) and call.sync.wait > 0 and not call.sync.leases and not visit.due:
            told_to_drain = visit.bot.draining and call.sync.status == BotStatus.OK.value
            if not told_to_drain:
                return _waiting(visit, call)
        answer = SyncAnswer(
            seq=visit.seq,
            leases=[call_sync.work(row) for row in visit.due],
            drain=visit.bot.draining,
            expires_in=max(0.0, visit.remaining + visit.before),
            sync_in=self._timing.sync,
        )
        return answer.model_dump_json(exclude_none=True).encode()


def _waiting(visit: Visit, call: Asked) -> Waiting:
    return Waiting(visit.bot.name, visit.bot.id, visit.bot.epoch, call.sync.seq, call.began)
