"""A small pool with everything in it: three tenants, schedules in eight zones, windows, limits, graphs, faults.

Each job tells in its command how it will go: `run SECONDS` succeeds, `fail SECONDS` fails. Each day has a calm: from
02:00 to 05:00 UTC nobody submits, but for the window of the night. Operators undo what holds jobs back, and lost bots
return. So at 05:00 nothing may wait but what must.
"""

import math
import random
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from zoneinfo import ZoneInfo

from assigner.maintenance.upkeep import DAY, HOUR
from assigner.settings import PoolSettings
from assigner.simulation.clock import count_escaped, find_escapes
from assigner.simulation.loop import living
from bots.protocol import OpenSession, Work
from bots.simulation.bots import Run, simulated_bots
from bots.sync.fetch import FetchSettings
from schema import clock
from schema.accounting import quotas
from schema.diagnostics import invariants
from schema.moves.cancel import cancel
from schema.moves.graphs import submit_graph
from schema.moves.sessions import drain
from schema.moves.submit import submit
from schema.moves.waiting.hold import park, unpark
from schema.moves.waiting.reschedule import reschedule
from schema.postgres.connection import Connection
from schema.postgres.statements import Row
from schema.requests import GraphRequest, JobRequest
from schema.tenancy import pausing

#: Hours of the calm, UTC.
CALM_FROM, CALM_UNTIL = 2, 5
ACTOR = "life"
#: Seconds within which a job starts for which a bot is free.
START_WITHIN = 10.0
#: Zones whose clocks change at different days and hours, or not at all, by hours or half an hour.
ZONES = (
    "Europe/Berlin", "America/New_York", "America/St_Johns", "Australia/Lord_Howe", "Africa/Cairo", "America/Santiago",
    "Asia/Kathmandu", "Pacific/Auckland",
)  # fmt: skip
#: Slots of the lock that jobs of a tenant take, and the rate of a resource class: starts a second, and at once.
SLOTS, RATE, BURST = 2, 1 / 60, 3
#: Hours of the window of the class `night`, and its zone.
OPENS, CLOSES, WINDOW_ZONE = 22, 6, "America/New_York"
TENANTS = ("red", "green", "blue")
#: The only bot of its operating system.
BSD = "bot-3"
#: Seconds before it returns at which jobs come that it alone can run. Each look in vain lets their queue rest longer,
#: and the last rest is not over when it is back.
BEFORE_RETURN = (400.0, 330.0, 260.0, 190.0, 120.0, 20.0)
#: The most units that `green` may use.
GREEN_MOST = 4

SETTINGS = PoolSettings.model_validate(
    {
        # Of two starts that need a cycle each, the second comes in time too.
        "assigners": [{"minimums_first": True, "interval": 1800.0, "busy_sleep_factor": 0.001, "jitter": 0.0}],
        "quotas": {"preemption": True, "preemption_delay": 30.0},
        "instances": [{"name": name} for name in TENANTS],
        "rates": [{"resource": "api", "per_second": RATE, "burst": BURST}],
        "windows": [{"name": "night", "start": OPENS, "end": CLOSES, "zone": WINDOW_ZONE, "types": ["night"]}],
        "schedules": [
            {"name": f"noon-{nth}", "instance": "red", "cron": "30 12 * * *", "zone": zone,
             "job": {"command": ["run", "60"]}}
            for nth, zone in enumerate(ZONES)
        ],
    }
)  # fmt: skip


#: Seconds for which finished jobs are kept, by their state.
KEPT = {
    "succeeded": SETTINGS.upkeep.keep_succeeded,
    "failed": SETTINGS.upkeep.keep_failed,
    "cancelled": SETTINGS.upkeep.keep_cancelled,
    "dead": SETTINGS.upkeep.keep_dead,
}


@dataclass
class Told:
    """What the scenario knows of one job, to judge its start by."""

    earliest: float = 0.0
    latest: float = math.inf
    night: bool = False
    api: bool = False
    lock: str = ""


@dataclass
class Life:
    """One life, in the empty database of `url`.

    start: its first midnight, UTC. jobs_a_day: on average, beside graphs and schedules. verified_every: hours between
    two checks of the invariants. upkeep_every: as of `SimulatedPool`. wrong: a sentence for each thing that must not
    have happened, the first 20 of them. done: how often callers, operators and bots did what. digest: of all leases
    that are kept at the end; equal for equal seeds.
    """

    url: str
    seed: int
    start: datetime
    jobs_a_day: float = 200.0
    verified_every: int = 1
    upkeep_every: float = HOUR
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    digest: str = ""

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{self.seed} life")
        self.told: dict[str, Told] = {}
        self.open: list[str] = []
        self.empty: set[int] = set()
        self.ticks: dict[str, list[datetime]] = {}
        self.of_rate: list[float] = []

    def run(self, days: int) -> None:
        """Let the pool live so many days, and judge what it did."""
        began, real = self.start.timestamp(), clock.wall()
        bots_of = partial(
            simulated_bots,
            timing=SETTINGS.timing,
            fetch=FetchSettings(),
            cooldown=SETTINGS.quotas.of_evictions,
            runs=self._begin,
            seed=self.seed,
        )
        every = self.upkeep_every
        with living(self.url, SETTINGS, bots_of, start=began, seed=self.seed, upkeep_every=every) as (pool, bots):
            self.pool, self.bots = pool, bots
            self._do = pool.database.run
            self._do(self._set_up)
            bots.open(*[OpenSession(bot=f"bot-{nth}", capacity=2, properties=_offer(nth)) for nth in range(4)])
            for day in range(days):
                self._plan(began + day * DAY)
                pool.run(began + (day + 1) * DAY)
            self._judge_ticks(days)
            self._judge_clock(real)
            self.digest = self._do(_leases)

    def _plan(self, midnight: float) -> None:
        """Plan one day: its arrivals, its faults, what operators do, its calm and its checks."""
        at, chance = self.pool.at, self.chance
        busy = (*range(CALM_FROM), *range(CALM_UNTIL, 24))
        acts: list[tuple[float, Callable[[], object]]] = [
            (self.jobs_a_day, self._submit), (0.5, self._burst), (2.0, self._graph), (2.0, self._cancel),
            (1.0, self._reschedule), (1.0, self._hold), (0.7, self._kill), (0.4, self._leave), (0.4, self._drain),
            (0.3, self._pause), (0.5, self._quota),
        ]  # fmt: skip
        for often, act in acts:
            for _ in range(_drawn(chance, often)):
                at(midnight + HOUR * (chance.choice(busy) + chance.random()), self._noted(act))
        day = datetime.fromtimestamp(midnight, UTC).replace(tzinfo=ZoneInfo(WINDOW_ZONE))
        for edge in (timedelta(hours=CLOSES, minutes=30), timedelta(hours=OPENS, minutes=-30)):
            at((day + edge).timestamp(), self._noted(self._night))
        at(midnight + CALM_FROM * HOUR, self._heal)
        at(midnight + 1.0, self._judge_graphs)
        at(midnight + CALM_UNTIL * HOUR - 1.0, self._judge_calm)
        for hour in range(0, 24, self.verified_every):
            at(midnight + hour * HOUR + 1800.0, self._verify)

    def _noted(self, act: Callable[[], object]) -> Callable[[], object]:
        def noted() -> None:
            self.done[act.__name__.strip("_")] += 1
            act()

        return noted

    @property
    def now(self) -> float:
        """The virtual time."""
        return self.pool.clock.now

    # Callers

    def _job(self) -> dict[str, object]:
        chance = self.chance
        seconds = round(chance.expovariate(1 / 600), 1)
        verb = "fail" if chance.random() < 0.1 else "run"
        job: dict[str, object] = {
            "command": [verb, str(seconds)],
            "priority": chance.choice((-5, 0, 0, 0, 10)),
            "instance": chance.choice(TENANTS),
            "max_attempts": chance.choice((1, 3)),
            "retry_failed": True,
        }
        kind = chance.random()
        if kind < 0.12:
            job["delay"] = round(chance.uniform(60, 30 * HOUR), 1)
        elif kind < 0.24:
            job["locks"] = [f"press:{SLOTS}"]
        elif kind < 0.32:
            job["resource_class"] = "api"
        elif kind < 0.40:
            job["job_class"] = "night"
        elif kind < 0.48:
            job["dedup_key"] = f"key-{chance.randrange(4)}"
        elif kind < 0.56:
            job["properties"] = {"os": chance.choice(("linux", "bsd"))}
        elif kind < 0.60:
            job["queue_timeout_seconds"] = 120.0
        elif kind < 0.64:
            job["timeout_seconds"] = 300.0
        return job

    def _submit(self) -> None:
        job = self._job()
        (made,) = self._do(lambda c: submit(c, [JobRequest.model_validate(job).normal()], actor=ACTOR))
        if made.created:
            delay = float(job.get("delay", 0.0))  # type: ignore[arg-type]
            latest = self.now + float(job.get("queue_timeout_seconds", math.inf))  # type: ignore[arg-type]
            told = Told(self.now + delay, latest)
            told.night, told.api = job.get("job_class") == "night", "resource_class" in job
            told.lock = str(job["instance"]) if "locks" in job else ""
            self.told[made.public_id] = told
            self.open.append(made.public_id)

    def _night(self) -> None:
        """A job that has just missed its window, or comes a little before it opens."""
        job = JobRequest(command=["run", "60"], instance="red", priority=0, job_class="night").normal()
        (made,) = self._do(lambda c: submit(c, [job], actor=ACTOR))
        self.told[made.public_id] = Told(night=True)
        sync = SETTINGS.timing.sync
        self.pool.at(
            self.now + HOUR,
            lambda: self._do(lambda c: cancel(c, [made.public_id], instances=None, sync=sync, actor=ACTOR)),
        )

    def _rest(self) -> None:
        """A job whose queue rests until the only bot that could run it is back."""
        job = JobRequest(command=["run", "60"], instance="blue", properties={"os": "bsd"}).normal()
        self._do(lambda c: submit(c, [job], actor=ACTOR))

    def _burst(self) -> None:
        """Jobs that fill all bots for an hour, then some of `red`, for whose minimum the least urgent ones are evicted.

        Those of a tenant with limits come last, when `green` has waiting jobs and bots have room again.
        """
        tenant = self.chance.choice(("green", "blue"))
        long = [
            JobRequest(command=["run", "1200"], instance=name, priority=priority).normal()
            for name, priority, count in (("blue", 5, 4), ("green", 6, 12), ("blue", 7, 4))
            for _ in range(count)
        ]
        limited = [
            JobRequest(command=["run", "5"], instance=tenant, priority=8, **each).normal()
            for each in 5 * ({"resource_class": "api"}, {"locks": [f"press:{SLOTS}"]})
        ]
        hasty = JobRequest(command=["run", "5"], instance=tenant, priority=9, queue_timeout_seconds=60).normal()
        jobs = [*long, hasty, *limited]
        made = self._do(lambda c: submit(c, jobs, actor=ACTOR))
        others = [each.public_id for each, job in zip(made, jobs, strict=True) if job["instance"] != "green"]
        for each, kind in zip(made[len(long) + 1 :], 5 * ("api", "lock"), strict=True):
            self.told[each.public_id] = Told(api=kind == "api", lock=tenant if kind == "lock" else "")
        self.pool.at(self.now + 120.0, self._judge_idle)
        self.pool.at(self.now + 300.0, partial(self._short, others))

    def _short(self, others: list[str]) -> None:
        """Two jobs of `red`, or none: the second wakes the assigners when the first has waited long enough to evict for
        it, and by chance both are withdrawn before their victim has gone, or later all that `others` than `green` have:
        then nobody wants what the eviction has taken off its maximum."""
        ids: list[str] = []
        job = JobRequest(command=["run", "60"], instance="red").normal()

        def come() -> None:
            ids.extend(each.public_id for each in self._do(lambda c: submit(c, [job], actor=ACTOR)))

        def go(ids: list[str]) -> None:
            self._do(lambda c: cancel(c, ids, instances=None, sync=SETTINGS.timing.sync, actor=ACTOR))

        come()
        evicted_at = self.now + SETTINGS.quotas.preemption_delay + 1.0
        self.pool.at(evicted_at, come)
        if self.chance.random() < 0.5:
            self.pool.at(evicted_at + 1.0, partial(go, ids))
        else:
            self.pool.at(evicted_at + 90.0, partial(go, others))
        self.pool.at(evicted_at + 120.0, self._judge_idle)

    def _graph(self) -> None:
        chance = self.chance
        nodes = []
        for node in range(chance.randint(2, 8)):
            job = {"command": ["fail" if chance.random() < 0.1 else "run", str(round(chance.uniform(1, 900), 1))]}
            after = sorted(chance.sample(range(node), min(node, chance.randint(0, 2))))
            nodes.append({**job, "node": node, "after": after})
        given = {"name": f"graph-{chance.randrange(10**9)}", "instance": chance.choice(TENANTS), "nodes": nodes,
                 "on_failure": chance.choice(("cancel", "run"))}  # fmt: skip
        request = GraphRequest.model_validate(given).normal()
        self._do(lambda c: submit_graph(c, request, sync=SETTINGS.timing.sync, actor=ACTOR))

    def _some(self) -> list[str]:
        self.open = self.open[-200:]
        return [self.chance.choice(self.open)] if self.open else []

    def _cancel(self) -> None:
        ids = self._some()
        self._do(lambda c: cancel(c, ids, instances=None, sync=SETTINGS.timing.sync, actor=ACTOR))

    def _reschedule(self) -> None:
        """Move a job that has come before, and one that has just come."""
        job = JobRequest(command=["run", "60"], instance="blue").normal()
        (made,) = self._do(lambda c: submit(c, [job], actor=ACTOR))
        self.told[made.public_id] = Told()
        ids, delay = [*self._some(), made.public_id], round(self.chance.uniform(0, 10 * HOUR), 1)
        found = self._do(lambda c: reschedule(c, ids, delay=delay, instances=None, reason=None, actor=ACTOR))
        for each in found:
            if each.changed:
                self.told[each.public_id].earliest = self.now + delay

    def _hold(self) -> None:
        """Hold a job until the calm, and one that has just come for an hour."""
        job = JobRequest(command=["run", "60"], instance="blue").normal()
        (made,) = self._do(lambda c: submit(c, [job], actor=ACTOR))
        ids = [*self._some(), made.public_id]
        self._do(lambda c: park(c, ids, instances=None, reason="a look", actor=ACTOR))
        self.pool.at(self.now + HOUR, lambda: self._release([made.public_id]))
        self.pool.at(self.now + HOUR + START_WITHIN + 1.0, self._judge_idle)

    def _release(self, ids: list[str]) -> None:
        self._do(lambda c: unpark(c, ids, instances=None, reason=None, actor=ACTOR))

    # Bots and operators

    def _kill(self) -> None:
        self._gone(self.bots.kill)

    def _leave(self) -> None:
        self._gone(self.bots.leave)

    def _judge_lost(self, name: str) -> None:
        """What a bot ran that is lost for longer than the pool takes to notice has been given back."""
        if name not in self.bots.living and (left := self._do(lambda c: _held_by(c, name))):
            self._find(f"{name} is lost and still has {left} leases")

    def _gone(self, end: Callable[[str], None]) -> None:
        """Let a bot end, and come back some minutes or hours later."""
        living = self.bots.living
        if len(living) > 1:
            name = self.chance.choice(living)
            end(name)
            self.pool.at(self.now + SETTINGS.timing.detect + START_WITHIN, lambda: self._judge_lost(name))
            away = self.chance.uniform(5.0, 5 * HOUR)
            self.pool.at(self.now + away, lambda: self._return(name))
            for before in BEFORE_RETURN if name == BSD else ():
                self.pool.at(self.now + max(1.0, away - before), self._noted(self._rest))

    def _return(self, name: str) -> None:
        if name not in self.bots.living:
            self.bots.open(self.bots.bots[name].opening)
            self.pool.at(self.now + START_WITHIN + 1.0, self._judge_idle)

    def _drain(self) -> None:
        name = self.chance.choice(list(self.bots.bots))
        deadline = self.chance.choice((None, 600.0))
        self._do(lambda c: drain(c, name, draining=True, actor=ACTOR, reason="repair", deadline=deadline))

    def _pause(self) -> None:
        tenant = self.chance.choice(TENANTS)
        self._do(lambda c: pausing.pause(c, "instance", tenant, instance="", actor=ACTOR, reason="a look"))

    def _quota(self) -> None:
        minimum = self.chance.choice((0, 1, 2))
        self._do(lambda c: quotas.set_quota(c, "default", "red", minimum=minimum, maximum=None, actor=ACTOR))

    def _set_up(self, connection: Connection) -> None:
        quotas.set_quota(connection, "default", "green", minimum=0, maximum=GREEN_MOST, actor=ACTOR)
        quotas.set_quota(connection, "default", "red", minimum=1, maximum=None, actor=ACTOR)

    def _heal(self) -> None:
        """Undo what holds jobs back. What could start now does."""
        self.pool.at(self.now + START_WITHIN + 1.0, self._judge_idle)
        for name in self.bots.bots:
            self._return(name)
            self._do(lambda c, name=name: drain(c, name, draining=False, actor=ACTOR, reason="", deadline=None))  # type: ignore[misc]
        for tenant in TENANTS:
            self._do(lambda c, tenant=tenant: _resume(c, tenant))  # type: ignore[misc]
        held = self._do(
            lambda c: [row.id for row in c.execute_sql("SELECT public_id AS id FROM jobs WHERE state = 'parked'")]
        )
        self._release([str(each) for each in held])

    # Judgements

    def _begin(self, work: Work, _chance: random.Random) -> Run:
        """Judge the start of an attempt, and say how it will go."""
        assert work.payload is not None, "a new lease has its payload"
        self.done["starts"] += 1
        told = self.told.get(work.job)
        if told is not None:
            if self.now < told.earliest - 1e-3:
                self._find(f"job {work.job} starts {told.earliest - self.now:.3f} s too early")
            if self.now > told.latest + SETTINGS.timing.reap and work.attempt == 1:
                self._find(f"job {work.job} starts {self.now - told.latest:.3f} s after its queue timeout")
            if told.night and not _is_open(self.now):
                self._find(f"job {work.job} starts outside of its window")
            if told.api:
                self.pool.at(self.now + START_WITHIN + 1.0, self._judge_idle)
                self._judge_rate(self._do(lambda c: _granted(c, work)))
            if told.lock and self._holders(told.lock) >= SLOTS:
                self._find(f"job {work.job} of {told.lock} starts beside {SLOTS} holders of its lock")
        environment = work.payload.get("env", {})
        if "LEASEHOLD_TICK" in environment and work.attempt == 1:
            tick = datetime.fromisoformat(environment["LEASEHOLD_TICK"])
            self.ticks.setdefault(environment["LEASEHOLD_SCHEDULE"], []).append(tick)
        verb, seconds = work.payload["command"]
        return Run(float(seconds), "failed" if verb == "fail" else "succeeded")

    def _judge_rate(self, granted: float) -> None:
        """No span of s seconds has more than burst + rate * s grants. Bots hear of some grants later than of others."""
        insort(self.of_rate, granted)
        for begin, end in zip(self.of_rate, self.of_rate[BURST:], strict=False):
            if (end - begin) * RATE < 1.0 - 1e-3:
                self._find(f"{BURST + 1} grants of the rate within {end - begin:.3f} s")
        del self.of_rate[: -4 * BURST]

    def _find(self, wrong: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(f"{datetime.fromtimestamp(self.now, UTC):%Y-%m-%d %H:%M:%S}: {wrong}")

    def _verify(self) -> None:
        for finding in invariants.verify(self.pool.database):
            if finding.rows:
                self._find(f"{finding.id} {finding.title}: {finding.sample}")
        self._judge_idle()
        for row in (*self._do(_overfull), *self._do(_kept_too_long), *self._do(_unlogged)):
            self._find(row)

    def _holders(self, tenant: str) -> int:
        """The jobs that hold the lock of a tenant."""
        held = (job for bot in self.bots.bots.values() for job in bot.held)
        return sum(job in self.told and self.told[job].lock == tenant for job in held)

    def _judge_graphs(self) -> None:
        """A graph none of whose jobs is kept goes within a day."""
        empty = self._do(_empty_graphs)
        if left := self.empty & empty:
            self._find(f"{len(left)} graphs without a job are kept")
        self.empty = empty

    def _judge_idle(self) -> None:
        """No job has waited for longer than the bound while a bot that could take it is free, or beyond its own time;
        no bot keeps room for an instance beyond the time of it; maximums are lowered by evictions as they should."""
        for wrong in self._do(_lowered):
            self._find(wrong)
        for row in self._do(_startable):
            self._find(f"job {row.id} waits, but a bot that could take it is free")
        for row in self._do(_overdue):
            self._find(f"job {row.id} waits beyond its queue timeout")
        for row in self._do(_keeping):
            self._find(f"{row.name} keeps {row.kept_units} units that nobody has come for")

    def _judge_calm(self) -> None:
        """After three hours without arrivals and faults nothing may wait but for a time, a window or another node."""
        for row in self._do(_waiting):
            told = self.told.get(str(row.id))
            if not (told is not None and told.night and not _is_open(self.now)):
                self._find(f"job {row.id} ({row.state}) waits although nothing holds it back")

        held = {(job, each.fence) for bot in self.bots.bots.values() for job, each in bot.held.items()}
        for row in self._do(_live):
            if (str(row.job), row.fence) not in held:
                self._find(f"job {row.job} is {row.state}, but no bot has it")

    def _judge_clock(self, real: float) -> None:
        """Nothing has told the time by another clock than the virtual one, which is years from the host's."""
        for place in self._do(find_escapes):
            self._find(f"{place} has a clock of its own")
        for column, count in self._do(lambda c: count_escaped(c, since=real - DAY, until=real + DAY)).items():
            self._find(f"{count} times in {column} are of another clock")

    def _judge_ticks(self, days: int) -> None:
        """A schedule for a time that each local day has once submits one job on each of them."""
        for nth, zone in enumerate(ZONES):
            ticks = self.ticks.get(f"noon-{nth}", [])
            local = [tick.astimezone(ZoneInfo(zone)) for tick in ticks]
            if any((each.hour, each.minute) != (12, 30) for each in local):
                self._find(f"a tick of noon-{nth} in {zone} is not at 12:30")
            wanted = _days(self.start, self.start + timedelta(days=days), zone)
            if missing := sorted(wanted - {each.date() for each in local}):
                self._find(f"noon-{nth} in {zone} left out {missing}")
            if len(local) > len({each.date() for each in local}):
                self._find(f"noon-{nth} in {zone} came twice on a day")


def _offer(nth: int) -> dict[str, str | list[str]]:
    return {"os": "bsd" if f"bot-{nth}" == BSD else "linux"}


def _drawn(chance: random.Random, often: float) -> int:
    """A number of independent events that happen `often` times a day on average (Poisson)."""
    count, left = 0, chance.expovariate(1.0)
    while left < often:
        count, left = count + 1, left + chance.expovariate(1.0)
    return count


def _is_open(at: float) -> bool:
    hour = datetime.fromtimestamp(at, ZoneInfo(WINDOW_ZONE)).hour
    return hour >= OPENS or hour < CLOSES


def _days(start: datetime, end: datetime, zone: str) -> set[date]:
    """The local days whose 12:30 lies between both times, a day and a calm before the end at the latest."""
    found = set[date]()
    day = start.astimezone(ZoneInfo(zone)).date() - timedelta(days=1)
    while day <= end.astimezone(ZoneInfo(zone)).date():
        noon = datetime(day.year, day.month, day.day, 12, 30, tzinfo=ZoneInfo(zone))
        if start < noon <= end - timedelta(hours=30):
            found.add(day)
        day += timedelta(days=1)
    return found


def _resume(connection: Connection, tenant: str) -> None:
    paused = connection.execute_sql(f"SELECT FROM instances WHERE name = '{tenant}' AND draining").all()
    if paused:
        pausing.resume(connection, "instance", tenant, instance="", actor=ACTOR)


def _waiting(connection: Connection) -> list[Row]:
    return connection.execute_sql(
        "SELECT public_id AS id, state FROM jobs WHERE state NOT IN ('succeeded', 'failed', 'dead', 'cancelled')"
        " AND state <> 'running' AND queued_at < now() - interval '2 hours'"
        " AND (schedule_after IS NULL OR schedule_after < now() - interval '2 hours')"
    ).all()


def _granted(connection: Connection, work: Work) -> float:
    """When the lease was granted, in seconds since 1970."""
    found = connection.execute_sql(
        "SELECT extract(epoch FROM l.granted_at)::double precision FROM leases l JOIN jobs j ON j.id = l.job_id"
        f" WHERE j.public_id = '{work.job}' AND l.fence = {int(work.fence)}"
    )
    return float(found.scalar_one())


def _startable(connection: Connection) -> list[Row]:
    """Jobs that wait although a bot has room, and so has their tenant: nothing was taken from it lately, or nobody else
    has a job that waits, or had one in the time within which jobs start."""
    lately = f"e.at > now() - interval '{quotas.EVICTION_COOLDOWN.seconds + START_WITHIN} s'"
    others = (
        "EXISTS (SELECT FROM jobs o WHERE o.instance <> i.id AND (o.state = 'queued' AND o.schedule_after IS NULL"
        f" OR EXISTS (SELECT FROM job_events t WHERE t.job_id = o.id AND t.at > now() - interval '{START_WITHIN} s')))"
    )
    return connection.execute_sql(
        "SELECT DISTINCT j.public_id AS id FROM jobs j JOIN instances i ON i.id = j.instance AND NOT i.draining"
        " JOIN kind_platforms k ON k.platform = j.platform JOIN bots b ON b.kind = k.kind AND b.free"
        f" AND b.opened_at < now() - interval '{START_WITHIN} s' AND b.capacity - b.in_use - b.kept_units >= j.units"
        " WHERE j.state = 'queued' AND j.schedule_after IS NULL AND NOT j.constrained"
        f" AND j.queued_at < now() - interval '{START_WITHIN} s'"
        " AND (i.name <> 'green'"
        f" OR NOT EXISTS (SELECT FROM evictions e WHERE e.instance = i.id AND {lately} AND {others})"
        "   AND j.units <= (SELECT greatest(0, "
        f"{GREEN_MOST} - coalesce(sum(l.units), 0)) FROM live l WHERE l.instance = i.id))"
    ).all()


def _overdue(connection: Connection) -> list[Row]:
    return connection.execute_sql(
        "SELECT public_id AS id FROM jobs WHERE state = 'queued'"
        f" AND queue_deadline < now() - interval '{SETTINGS.timing.reap + START_WITHIN} s'"
    ).all()


def _keeping(connection: Connection) -> list[Row]:
    return connection.execute_sql(
        "SELECT name, kept_units FROM bots WHERE kept_units > 0"
        f" AND kept_until < now() - interval '{SETTINGS.timing.reap + START_WITHIN} s'"
    ).all()


def _live(connection: Connection) -> list[Row]:
    return connection.execute_sql(
        "SELECT j.public_id AS job, l.fence, l.state FROM leases l JOIN jobs j ON j.id = l.job_id"
        " WHERE l.state IN ('pending', 'active', 'cancelling') AND l.granted_at < now() - interval '1 hour'"
    ).all()


def _overfull(connection: Connection) -> list[str]:
    held = connection.execute_sql(
        "SELECT i.name, sum(l.units)::integer AS units FROM leases l JOIN instances i ON i.id = l.instance"
        " WHERE l.state IN ('pending', 'active', 'cancelling') GROUP BY i.name"
    )
    return [f"{row.name} uses {row.units} units" for row in held if row.name == "green" and row.units > GREEN_MOST]


def _lowered(connection: Connection) -> list[str]:
    """Maximums that are not what is left of them by the evictions within the cooldown: in the mode `literal` always,
    in the mode `contended` while another tenant wants what they leave."""
    lost = "(SELECT count(*) FROM evictions e WHERE e.instance = i.id AND e.at > now() - interval '{} s')"
    lost = lost.format(quotas.EVICTION_COOLDOWN.seconds)
    taken = {row.name: row.taken for row in connection.execute_sql(f"SELECT i.name, {lost} AS taken FROM instances i")}
    wanting = {row.name for row in connection.execute_sql(
        "SELECT DISTINCT i.name FROM jobs j JOIN queues k ON k.id = j.queue"
        " JOIN instances i ON i.id = j.instance AND NOT i.draining LEFT JOIN quotas q ON q.instance = i.id"
        " WHERE j.state = 'queued' AND j.schedule_after IS NULL AND coalesce(k.schedule_after <= now(), true)"
        f" AND (q.max_quota IS NULL OR q.usage + j.units <= greatest(q.min_quota, q.max_quota - {lost}))")}  # fmt: skip
    found = []
    for is_literal in (True, False):
        for each in quotas.quotas(connection, cooldown=replace(quotas.EVICTION_COOLDOWN, literal=is_literal)):
            counted = taken[each.instance] if is_literal or wanting - {each.instance} else 0
            wanted = each.max_quota and max(each.min_quota, each.max_quota - counted)
            if each.effective_max != wanted:
                mode = "literal" if is_literal else "contended"
                found.append(f"{each.instance} has a maximum of {each.effective_max} instead of {wanted} ({mode})")
    return found


def _unlogged(connection: Connection) -> list[str]:
    """Evictions of the last day that are not in their log, which lowers maximums."""
    found = connection.execute_sql(
        "SELECT count(*) FROM leases l WHERE l.stop_reason = 'preempt' AND l.verdict IN ('stopped', 'released')"
        f" AND l.ended_to = 'queued' AND l.ended_at > now() - interval '{DAY} s'"
        " AND NOT EXISTS (SELECT FROM evictions e WHERE e.job_id = l.job_id AND e.fence = l.fence)"
    ).scalar_one()
    return [f"{found} evictions are not in their log"] if found else []


def _held_by(connection: Connection, bot: str) -> int:
    return int(
        connection.execute_sql(
            f"SELECT count(*) FROM live l JOIN bots b ON b.id = l.bot_id WHERE b.name = '{bot}'"
        ).scalar_one()
    )


def _kept_too_long(connection: Connection) -> list[str]:
    """What retention should have deleted half a day ago."""
    found = []
    for state, age in KEPT.items():
        old = f"FROM jobs WHERE state = '{state}' AND finished_at < now() - make_interval(secs => {age + DAY / 2})"
        if count := connection.execute_sql(f"SELECT count(*) {old}").scalar_one():
            found.append(f"{count} {state} jobs are kept too long")
    return found


def _empty_graphs(connection: Connection) -> set[int]:
    """Graphs that are over for two days and none of whose jobs is kept."""
    of_it = "SELECT FROM graph_nodes n JOIN jobs j ON j.id = n.job_id WHERE n.graph = g.id"
    over = f"finished_at < now() - make_interval(secs => {2 * DAY})"
    return {row.id for row in connection.execute_sql(f"SELECT id FROM graphs g WHERE {over} AND NOT EXISTS ({of_it})")}


def _leases(connection: Connection) -> str:
    """A digest of all leases that are kept, in the order of their jobs."""
    rows = connection.execute_sql(
        "SELECT md5(string_agg(concat_ws(' ', job_id, fence, bot_id, granted_at, ended_at, verdict), ','"
        " ORDER BY job_id, fence)) AS digest FROM leases"
    )
    return str(rows.one().digest)
