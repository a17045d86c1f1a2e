"""A pool in the test's database: jobs, bots, assigners, graphs and success counts, made by the real functions."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from leasehold.errors import BadInput, LeaseholdError

from assigner.admission.controller import AdmissionController, AdmissionResult
from assigner.admission.state import AdmissionState
from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.cycle.settings import AssignerSettings
from assigner.maintenance.retention import Retention
from assigner.maintenance.upkeep import Upkeep, UpkeepSettings
from assigner.placement.strategy import Policy, Snapshot, Strategy, group_jobs
from bots.protocol import LeaseReport, OpenSession, Outcome, Session, Sync
from bots.sync import sessions
from bots.sync.call import Call, HeldCall, NewCall
from bots.sync.fetch import FetchSettings
from bots.sync.settle import SyncService
from schema import clock
from schema.fleet import success
from schema.fleet.candidates import FreeBot
from schema.fleet.success import SuccessSettings
from schema.moves import graphs
from schema.moves import submit as submit_moves
from schema.moves.graphs import SubmittedGraph, submit_graph
from schema.picking.constrained import ConstrainedQueue, QueueHead
from schema.picking.pick import ReadyJob
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.timing import Timing
from schema.validation import normal_properties


def open_session(database: Database, request: OpenSession, *, timing: Timing) -> Session:
    """Open one session, or raise its error."""
    (answer,) = sessions.open_sessions(database, [request], timing=timing)
    if isinstance(answer, BadInput):
        raise answer
    return answer


def settled(sync_service: SyncService, call: Call) -> bytes | HeldCall:
    """The answer to this call. Raises the error if the call is refused."""
    (answer,) = sync_service.answer([call])
    if isinstance(answer, LeaseholdError):
        raise answer
    return answer


def synced(sync_service: SyncService, message: Sync) -> bytes | HeldCall:
    """The answer to a call that has just arrived."""
    return settled(sync_service, NewCall(message, clock.monotonic()))


def answered(sync_service: SyncService, message: Sync) -> bytes:
    """The answer to a call that has just arrived, without waiting for news if it would be held."""
    answer = synced(sync_service, message)
    if isinstance(answer, HeldCall):
        answer = settled(sync_service, answer)
    assert isinstance(answer, bytes)
    return answer


# Jobs, bots and assigners


@dataclass
class Bot:
    """A bot as the sync service sees it: keeps its session and numbers its calls."""

    sync_service: SyncService
    session: Session
    seq: int = 0
    holding: dict[tuple[str, int], str] = field(default_factory=dict)

    def message(self, *reports: LeaseReport, **fields: Any) -> Sync:
        """The next call, with these reports."""
        self.seq += 1
        return Sync(
            bot=self.session.bot,
            epoch=self.session.epoch,
            secret=self.session.secret,
            seq=self.seq,
            leases=list(reports),
            **fields,
        )

    def sync(self, *reports: LeaseReport, **fields: Any) -> dict[str, Any]:
        """Call once and return the decoded answer."""
        answer = synced(self.sync_service, self.message(*reports, **fields))
        assert not isinstance(answer, HeldCall), "the call was held back"
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    def take(self) -> list[dict[str, Any]]:
        """Fetch the offered leases, report all of them active, and return them."""
        offered = self.sync()["leases"]
        if not offered:
            return []
        answer = self.sync(*[active(work) for work in offered])
        return list(answer["leases"])


def active(work: dict[str, Any]) -> LeaseReport:
    """Report that the bot runs the job."""
    return LeaseReport(job=work["job"], fence=work["fence"], state="active")


def completed(work: dict[str, Any], verdict: str = "succeeded", **fields: Any) -> LeaseReport:
    """Report that the bot has ended the job."""
    outcome = Outcome(verdict=verdict, **fields)  # type: ignore[arg-type]
    return LeaseReport(job=work["job"], fence=work["fence"], state="completed", outcome=outcome)


def slow_clock() -> float:
    """A thousandth of the real time, so that nothing is slow by it: how busy the machine is must decide nothing."""
    return clock.monotonic() / 1000


#: What an assigner and upkeep are made of beside their settings.
ASSIGNER_PARTS = ("chance", "name", "now", "quotas", "cohorts", "rules", "recorder", "policy")
UPKEEP_PARTS = ("now", "webhooks", "tracer")


class Pool:
    """A pool on one database, with helpers to submit jobs, make bots and read rows."""

    def __init__(self, database: Database, timing: Timing, chance: random.Random) -> None:
        self.database, self.timing, self.chance = database, timing, chance

    def submit(self, count: int = 1, **fields: Any) -> list[str]:
        """Queue jobs; returns their public ids."""
        properties = normal_properties("properties", fields.pop("properties", {}))
        request = {"instance": "default", "payload": {"command": ["true"]}, **fields, "properties": properties}
        requests = [request for _ in range(count)]
        found = self.database.run(lambda connection: submit_moves.submit(connection, requests, actor="test"))
        return [job.public_id for job in found]

    def running(self, **fields: Any) -> tuple[str, Bot, dict[str, Any]]:
        """Make a job that a bot runs. Returns the job's public id, the bot and the lease."""
        (job,) = self.submit(**fields)
        bot = self.bot()
        self.assigner().run_once()
        (work,) = bot.take()
        return job, bot, work

    def sync_service(self, **fetch: Any) -> SyncService:
        """A sync service with these fetch settings."""
        return SyncService(self.database, timing=self.timing, fetch=FetchSettings(**fetch), now=clock.monotonic)

    def bot(self, name: str = "bot-1", *, sync_service: SyncService | None = None, **fields: Any) -> Bot:
        """A bot with an open session that has synced once, and so may be given jobs."""
        session = open_session(self.database, OpenSession(bot=name, **fields), timing=self.timing)
        bot = Bot(self.sync_service(enabled=False), session)
        bot.sync()
        bot.sync_service = sync_service or self.sync_service()
        return bot

    def restarted(self, bot: Bot, **fields: Any) -> Bot:
        """The same bot with a new session that declares the older one dead, so nothing of it runs any more."""
        dead = sessions.digest(bot.session.secret).hex()
        return self.bot(bot.session.bot, dead_session=dead, **fields)

    def assigner(self, **settings: Any) -> PriorityAgeAssigner:
        """An assigner that the test runs cycle by cycle; it serves minimums first. Its parts may be given, too."""
        parts: dict[str, Any] = {"chance": self.chance, "name": "assigner:test", "now": slow_clock}
        parts |= {name: settings.pop(name) for name in ASSIGNER_PARTS if name in settings}
        chosen = AssignerSettings(**{"minimums_first": True, **settings})
        return PriorityAgeAssigner(self.database, chosen, timing=self.timing, **parts)

    def upkeep(self, **settings: Any) -> Upkeep:
        """Upkeep that the test runs round by round. Its parts may be given, too."""
        parts = {"now": slow_clock} | {name: settings.pop(name) for name in UPKEEP_PARTS if name in settings}
        return Upkeep(self.database, UpkeepSettings(**settings), timing=self.timing, name="upkeep:test", **parts)

    def retention(self, **settings: Any) -> Retention:
        """The deletion of finished jobs and graphs, which the test runs round by round."""
        return Retention(self.database, UpkeepSettings(**settings), now=slow_clock)

    def job(self, public_id: str) -> Any:
        """The job's row."""
        return self.row("SELECT * FROM jobs WHERE public_id = CAST(:id AS uuid)", id=public_id)

    def queue_of(self, public_id: str) -> Any:
        """The row of the job's queue."""
        return self.row(
            "SELECT q.* FROM jobs j JOIN queues q ON q.id = j.queue WHERE j.public_id = CAST(:id AS uuid)", id=public_id
        )

    def rest_queues(self, seconds: float, where: str = "true") -> None:
        """Let the queues of these jobs rest for so many seconds from now; if they are negative, the rest is over."""
        self.change(
            "UPDATE queues SET looks = greatest(looks, 1), schedule_after = now() + make_interval(secs => :seconds)"
            f" WHERE id IN (SELECT queue FROM jobs WHERE {where})",
            seconds=seconds,
        )

    def row(self, query: str, **values: Any) -> Any:
        """The only row of a query."""
        return self.database.run(lambda connection: connection.execute(Statement(query), values).one())

    def rows(self, query: str, **values: Any) -> list[Any]:
        """All rows of a query."""
        return self.database.run(lambda connection: list(connection.execute(Statement(query), values)))

    def change(self, statement: str, **values: Any) -> None:
        """Change rows directly, to arrange a state that only time or a fault would cause."""
        if values:
            self.database.run(lambda connection: connection.execute(Statement(statement), values))
        else:
            self.database.run(lambda connection: connection.execute_sql(Statement(statement).query.decode()))

    def granted(self) -> list[str]:
        """Public ids of the jobs that were given to bots, in that order."""
        grants = "SELECT j.public_id FROM job_events e JOIN jobs j ON j.id = e.job_id WHERE e.move = 'grant'"
        return [str(row.public_id) for row in self.rows(grants + " ORDER BY e.id")]

    def given(self, bot: Bot) -> list[dict[str, Any]]:
        """One cycle of an assigner, and what the bot runs after it."""
        self.assigner().run_once()
        return bot.take()

    def history(self, public_id: str) -> list[str]:
        """The moves of a job, oldest first."""
        return [
            row.move
            for row in self.rows(
                "SELECT e.move FROM job_events e JOIN jobs j ON j.id = e.job_id"
                " WHERE j.public_id = CAST(:id AS uuid) ORDER BY e.id",
                id=public_id,
            )
        ]


# Graphs


After = Mapping[int, Iterable[int | Mapping[str, Any]]]


def graph_of(after: After, *, name: str = "build", **fields: Any) -> dict[str, Any]:
    """A graph request from a mapping of each node to the nodes that it depends on."""
    nodes = [
        {"node": node, "after": list(parents), "payload": {"command": ["true"]}} for node, parents in after.items()
    ]
    return {"name": name, "nodes": nodes, **fields}


def submitted(pool: Pool, after: After, **fields: Any) -> SubmittedGraph:
    """Submit a graph given as a mapping of each node to the nodes that it depends on."""
    return taken(pool, graph_of(after, **fields))


def taken(pool: Pool, request: Mapping[str, Any]) -> SubmittedGraph:
    """Submit a graph request."""
    return pool.database.run(lambda c: submit_graph(c, request, sync=pool.timing.sync, actor="test"))


def cancel_graph(pool: Pool, graph: str) -> Any:
    """Cancel the graph as an operator."""
    return pool.database.run(
        lambda c: graphs.cancel_graph(c, graph, instances=None, sync=pool.timing.sync, actor="test")
    )


def states(pool: Pool, graph: SubmittedGraph) -> dict[int, str]:
    """Node → state of its job, or its outcome if the job was deleted."""
    return {
        row.node_no: row.state
        for row in pool.rows(
            "SELECT n.node_no, coalesce(j.state, n.outcome) AS state FROM graph_nodes n"
            " LEFT JOIN jobs j ON j.id = n.job_id WHERE n.graph = :id ORDER BY n.node_no",
            id=graph.graph_id,
        )
    }


def number(graph: SubmittedGraph, job: str) -> int:
    """Number of the node that has this job."""
    return next(node for node, each in graph.jobs.items() if each == job)


def work_off(pool: Pool, bot: Bot, graph: SubmittedGraph, verdicts: Mapping[int, str] | None = None) -> list[int]:
    """Run all jobs that the bot receives until none is left. Returns the nodes in the order in which they ended."""
    order: list[int] = []
    assigner = pool.assigner(batch=1000)
    while True:
        assigner.run_once()
        offered = bot.take()
        if not offered:
            return order
        nodes = [number(graph, work["job"]) for work in offered]
        order += nodes
        ends = [(verdicts or {}).get(node, "succeeded") for node in nodes]
        bot.sync(*[completed(work, end) for work, end in zip(offered, ends, strict=True)])


def layered(nodes: int, *, parents: int, chance: random.Random) -> dict[int, list[int]]:
    """A graph in rows of fifty nodes; each node depends on `parents` nodes of the row before."""
    near = {node: range(max(1, (node - 1) // 50 * 50 - 49), (node - 1) // 50 * 50 + 1) for node in range(1, nodes + 1)}
    return {node: sorted(chance.sample(before, min(parents, len(before)))) for node, before in near.items()}


# Success of bots


ACTOR = "test"
#: Makes one job ready and puts all others into backoff.
ONLY = """
UPDATE jobs SET schedule_after =
    CASE WHEN public_id <> CAST(:job AS uuid) THEN now() + interval '1 hour' END WHERE state = 'queued'
"""


def count(pool: Pool, **settings: Any) -> None:
    """Count successes from now on, with these settings."""
    wanted = SuccessSettings(**{"statistics": True, **settings})
    pool.database.run(lambda connection: success.declare(connection, wanted, actor=ACTOR))


@contextmanager
def only(pool: Pool, bot: Bot) -> Iterator[None]:
    """Drain all other bots inside the block, so that jobs start on this bot only."""
    pool.change("UPDATE bots SET draining = true WHERE name <> :name", name=bot.session.bot)
    yield
    pool.change("UPDATE bots SET draining = false")


def granted_lease(pool: Pool, bot: Bot, job: str) -> dict[str, Any]:
    """Let this bot run the queued job, and return the lease."""
    pool.change(ONLY, job=job)
    with only(pool, bot):
        pool.assigner().run_once()
    work = next(each for each in bot.sync()["leases"] if each["job"] == job)
    bot.sync(active(work))
    return work


def ends(pool: Pool, bot: Bot, job: str, verdict: str = "succeeded") -> None:
    """Let the bot run the job, and end it with `verdict`."""
    bot.sync(completed(granted_lease(pool, bot, job), verdict))


def work_off_counting(pool: Pool, bot: Bot, verdict: str = "succeeded", *, jobs: int = 1, **fields: Any) -> list[str]:
    """Submit `jobs` jobs, and let the bot end them one after the other with `verdict`."""
    found = pool.submit(jobs, **fields)
    for job in found:
        ends(pool, bot, job, verdict)
    return found


def counts(pool: Pool, *columns: str) -> dict[tuple[str, str], tuple[float, ...]]:
    """(Bot, label) → successes and failures, or the given columns."""
    named = ", ".join(columns or ("successes", "failures"))
    rows = pool.rows(f"SELECT b.name, s.label, {named} FROM bot_success s JOIN bots b ON b.id = s.bot_id")
    return {(row[0], row[1]): tuple(round(value, 6) for value in row[2:]) for row in rows}


def blamed(pool: Pool) -> list[tuple[str | None, bool]]:
    """For each job to be tried again: the bot that was charged with the failure, and whether that was confirmed."""
    rows = pool.rows(
        "SELECT b.name, m.upheld_at IS NOT NULL AS upheld FROM blames m LEFT JOIN bots b ON b.id = m.bot_id"
        " ORDER BY m.job_id"
    )
    return [(row.name, row.upheld) for row in rows]


def on_probation(pool: Pool) -> list[str]:
    """Names of the bots on probation."""
    return [row.name for row in pool.rows("SELECT name FROM bots WHERE probation_until IS NOT NULL ORDER BY name")]


# Heads of queues for the pure functions of admission, without a database, at virtual times


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """The instant `seconds` after noon."""
    return NOON + timedelta(seconds=seconds)


def queue(*, instance: str = "default", constraint_set: int = 1, **constraints: Any) -> ConstrainedQueue:
    """A queue of constrained jobs of an instance, with these constraints."""
    key = hash(instance) % 1000
    return ConstrainedQueue(key * 1000 + constraint_set, 0, key, 1, constraint_set, instance, constraints, None, 0)


def head(
    nth: int,
    rank: float,
    *,
    since: float = 0.0,
    of: ConstrainedQueue | None = None,
    seconds: float | None = None,
    deadline: float | None = None,
    priority_inputs: Mapping[str, Any] | None = None,
) -> QueueHead:
    """A head of a queue. `since`, `deadline`: seconds after noon at which it was queued and must have ended."""
    found = of or queue()
    job = ReadyJob(nth, str(nth), found.id, found.cohort, found.instance, found.platform, round(rank), 1, None, False)
    due = None if deadline is None else at(deadline)
    return QueueHead(job, found, rank, at(since), 0, 1.0, seconds, due, priority_inputs or {})


def admission_state(seconds: float = 0.0, **fields: Any) -> AdmissionState:
    """The state that admission reads, at `seconds` after noon."""
    return AdmissionState(at(seconds), **fields)


def admitted(
    connection: Connection, controller: AdmissionController, *, batch: int, chance: random.Random
) -> AdmissionResult:
    """What a controller picks in one cycle, of jobs that take no resources."""
    found = controller.read_queues(connection, Scope(), batch=batch)
    found = replace(found, queues=chance.sample(found.queues, len(found.queues)))
    return controller.pick(connection, found, lacking={}, batch=batch, pace=1.0)


def busy_bot(pool: Pool, *, capacity: int = 1, **fetch: object) -> tuple[Bot, list[dict[str, Any]]]:
    """A full bot with these fetch settings, and the work it runs."""
    pool.submit(capacity)
    bot = pool.bot(capacity=capacity, sync_service=pool.sync_service(**fetch))
    return bot, pool.given(bot)


# Bots and jobs as strategies see them, for the pure functions of placement


#: Success rates by (bot, label).
Rates = Mapping[tuple[int, str], float]


def bot(number: int, free_units: int = 1, *, capacity: int | None = None, priority: int = 0) -> FreeBot:
    """A bot with so many free units: all that it has, unless `capacity` says more."""
    return FreeBot(number, f"bot-{number}", priority, free_units, capacity or free_units)


def job(number: int, *, units: int = 1, kind: int = 1, hint: str | None = None) -> ReadyJob:
    """A job that was picked. Jobs of one `kind` have a queue and a requirement set of their own."""
    return ReadyJob(number, str(number), kind, 0, 1, kind, 0, units, hint, False)


def snapshot(
    jobs: Sequence[ReadyJob], *candidates: Sequence[FreeBot], hits: Iterable[tuple[int, str]] = (), **fields: Any
) -> Snapshot:
    """These jobs with the candidates of each group of them; one list of bots is that of all groups."""
    groups = group_jobs(jobs)
    found = candidates * len(groups) if len(candidates) == 1 else candidates
    return Snapshot(jobs, groups, found, frozenset(hits), **fields)


def placed(strategy: Strategy, seen: Snapshot, policy: Policy | None = None) -> dict[int, int]:
    """Job → bot, in the order in which the strategy has placed them."""
    return {each.job_id: each.bot_id for each in strategy.choose(seen, policy or Policy(), how={})}
