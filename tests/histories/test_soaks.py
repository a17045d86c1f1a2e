"""Many assigners, quotas that change all the time, and minimums that are reclaimed: what holds at every instant."""

import os
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from leasehold.errors import NotFound

from assigner.admission.ordering import OrderingSettings
from assigner.admission.rules import Rules
from assigner.maintenance.overflow import OverflowController
from assigner.operator_resources.priorities import reprice
from assigner.preemption.plan import QuotaSettings
from schema import clock
from schema.accounting import counters, quotas
from schema.moves.cancel import cancel
from schema.moves.waiting.priority import set_priority_where
from schema.policy import priority_classes
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from schema.timing import Timing
from tests.support.assigners import assigner_processes
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Bot, Pool, active, completed
from tests.support.race import BACKENDS, DEADLOCK_TIMEOUT, DEADLOCKS
from tests.support.swarm import Swarm
from tests.support.tenancy import Tenancy, grown_too_far, watch_maxima

SECONDS_VARIABLE = "LEASEHOLD_TEST_SOAK"
SECONDS = 3.0
#: What each of the eight threads serves: everything, or one cohort; two threads to a process.
PROCESSES: tuple[tuple[int | None, ...], ...] = ((None, 1), (None, 2), (3, 1), (2, 3))
COHORTS, INSTANCES = (1, 2, 3), tuple(f"team-{n}" for n in range(5))
BOTS, CAPACITY, WAITING = 6, 2, 15
#: Units that all minimums of a cohort may add up to; the others leave room for whoever may be evicted.
MINIMUMS = 8
RULES = QuotaSettings(
    preemption_delay=1.0, eviction_cooldown=5.0, cooldown="literal", min_run_time=0.2, reservation=2.0
)
SAMPLE = 0.25
LOOK = Statement(f"""
SELECT q.cohort, q.instance, q.usage, q.min_quota, q.max_quota,
    (SELECT coalesce(sum(l.units), 0) FROM live l WHERE l.cohort = q.cohort AND l.instance = q.instance) AS live,
    {quotas.EFFECTIVE_MAX} AS maximum,
    EXISTS (SELECT FROM jobs j WHERE j.cohort = q.cohort AND j.instance = q.instance AND j.state = 'queued'
        AND j.units = 1 AND j.queued_at < clock_timestamp() - make_interval(secs => :delay)) AS waits
FROM quotas q""")


@contextmanager
def over_and_over(work: Callable[[], object], pause: float, errors: list[BaseException]) -> Iterator[None]:
    """Run `work` every `pause` seconds in a thread of its own."""
    over = threading.Event()

    def run() -> None:
        while not clock.wait(over, pause):
            try:
                work()
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Operator:
    """Changes quotas and priorities, each change in a transaction of its own, and says what a caller may ask for."""

    def __init__(self, pool: Pool, chance: random.Random) -> None:
        self.pool, self.chance, self.tenancy = pool, chance, Tenancy(pool)
        self.minimums: Counter[tuple[int, str]] = Counter()
        self.changes = 0

    def change(self) -> None:
        cohort, instance = self.chance.choice(COHORTS), self.chance.choice(INSTANCES)
        self.changes += 1
        if self.chance.random() < 0.15:
            self.minimums[cohort, instance] = 0
            try:
                self.pool.database.run(lambda c: quotas.remove_quotas(c, [(f"c-{cohort}", instance)], actor="test"))
            except NotFound:
                return
        elif self.chance.random() < 0.15:
            self.pool.database.run(
                lambda c: set_priority_where(
                    c, self.chance.randint(-5, 5), instances=[instance], label=None, limit=50, reason=None, actor="test"
                )
            )
        else:
            self.set(cohort, instance)

    def set(self, cohort: int, instance: str) -> None:
        self.minimums[cohort, instance] = 0
        taken = sum(units for (of, _), units in self.minimums.items() if of == cohort)
        minimum = min(self.chance.randint(0, 3), MINIMUMS - taken)
        self.minimums[cohort, instance] = minimum
        maximum = None if self.chance.random() < 0.2 else minimum + self.chance.randint(0, 5)
        self.tenancy.quota(instance, cohort=f"c-{cohort}", minimum=minimum, maximum=maximum)

    def submit(self) -> None:
        cohort, instance = self.chance.choice(COHORTS), self.chance.choice(INSTANCES)
        waiting = self.pool.row(
            "SELECT count(*) AS n FROM jobs j JOIN instances i ON i.id = j.instance"
            " WHERE j.state = 'queued' AND j.cohort = :cohort AND i.name = :instance",
            cohort=cohort,
            instance=instance,
        ).n
        if waiting < WAITING:
            self.pool.submit(
                self.chance.randint(1, 10),
                instance=instance,
                label=f"l-{cohort}",
                priority=self.chance.randint(-5, 5),
                units=2 if self.chance.random() < 0.1 else 1,
            )


def counted(pool: Pool) -> Counter[str]:
    """How many there were of each move."""
    return Counter({row.move: row.n for row in pool.rows("SELECT move, count(*) AS n FROM job_events GROUP BY move")})


class QuotaWatcher:
    """Looks at every quota and every lease in one snapshot, again and again."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._below: dict[tuple[int, int, int], float] = {}
        self.checks, self.above, self.uncounted = 0, 0, list[object]()
        #: The longest time for which an instance with work had less than its minimum, beside the delay itself.
        self.longest = 0.0

    def check(self) -> None:
        with self._database.connect() as connection:
            connection.execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            rows = connection.execute(LOOK, {**RULES.of_evictions.values(), "delay": RULES.preemption_delay})
            found, now = rows.all(), clock.monotonic()
        self.checks += 1
        still: dict[tuple[int, int, int], float] = {}
        for row in found:
            if row.usage != row.live:
                self.uncounted.append(row)
            self.above += row.maximum is not None and row.usage > row.maximum
            if row.waits and row.usage < row.min_quota:
                key = row.cohort, row.instance, row.min_quota
                still[key] = self._below.get(key, now)
                self.longest = max(self.longest, now - still[key])
        self._below = still


@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_assigners_keep_quotas_while_they_change(pool: Pool, database_url: str, chance: random.Random) -> None:
    """`LEASEHOLD_TEST_SOAK=60` goes on for a minute."""
    seconds = float(os.environ.get(SECONDS_VARIABLE) or SECONDS)
    timing = Timing(sync=0.5, ttl=20, reap=0.2, ack=5, poll=0.1)
    pool.change(DEADLOCK_TIMEOUT)
    pool.change(
        "INSERT INTO cohorts (id, name, labels, position, reclaim_min)"
        " SELECT n, 'c-' || n, ARRAY['l-' || n], n, 'any' FROM generate_series(1, 3) n"
    )
    watch_maxima(pool, cooldown=RULES.eviction_cooldown)
    database = Database(database_url, DatabaseSettings(pool=6), role="soak", chance=chance)
    operator = Operator(Pool(database, timing, chance), random.Random(chance.getrandbits(32)))
    caller = Operator(Pool(database, timing, chance), random.Random(chance.getrandbits(32)))
    watcher, errors = QuotaWatcher(database), list[BaseException]()
    for cohort in COHORTS:
        for instance in INSTANCES:
            operator.set(cohort, instance)
    how = {"seconds": lambda work: 0.5 + zlib.crc32(work.job.encode()) % 1000 / 500, "pace": 0.3, "threads": 1}
    swarms = [
        Swarm(database, timing, BOTS, capacity=CAPACITY, prefix=f"bot-{cohort}", **how)  # type: ignore[arg-type]
        for cohort in COHORTS
    ]
    for cohort, swarm in zip(COHORTS, swarms, strict=True):
        for bot in swarm.bots:
            bot.open = bot.open.model_copy(update={"labels": [f"l-{cohort}"]})
    upkeep = Pool(database, timing, chance).upkeep()
    with ExitStack() as running:
        settings = {"quotas": RULES, "interval": 0.2, "jitter": 0.1}
        running.enter_context(assigner_processes(database_url, timing, chance, PROCESSES, **settings))
        for swarm in swarms:
            running.enter_context(swarm)
        for work, pause in (
            (caller.submit, 0.1),
            (operator.change, 0.4),
            (watcher.check, SAMPLE),
            (upkeep.run_once, timing.reap),
        ):
            running.enter_context(over_and_over(work, pause, errors))
        began = clock.monotonic()

        def enough() -> bool:
            moved = counted(pool)
            return moved["preempted"] > 0 and moved["finish"] > 50 and clock.monotonic() - began > seconds

        eventually(lambda: errors or enough(), seconds + 4 * MINUTE, every=0.2)
    moved = counted(pool)
    most = pool.row("SELECT coalesce(max(evictions), 0) AS n FROM jobs").n
    print(
        f"{seconds:g} s: {dict(moved)}, {operator.changes} changes, {watcher.checks} looks, {watcher.above} found above"
    )
    print(f"longest below a minimum {watcher.longest:.2f} s; one job evicted at most {most} times")
    assert errors == []
    assert watcher.uncounted == [], "usage is that of the live leases at every instant"
    assert grown_too_far(pool) == [], "usage never grows beyond its effective maximum"
    assert watcher.longest <= RULES.preemption_delay + timing.detect + MINUTE
    assert [execution for swarm in swarms for execution in swarm.log.overlaps()] == []
    database.close()
    pool.database.close()
    eventually(lambda: pool.row(BACKENDS).others == 0)
    assert pool.row(DEADLOCKS).deadlocks == 0


# Classes, ageing, deadlines, promotion, overflow and quotas at once: whatever happens, every job comes to its end.


CLASSES = ("critical", "serious_project", "serious", "random", "auto_generated", "background", None)


def submitted(pool: Pool, chance: random.Random) -> None:
    kind = chance.choice(CLASSES)
    fields = {
        "job_class": kind,
        "user_priority": chance.randint(0, 10) if kind and chance.random() < 0.5 else None,
        "owner": chance.choice(["ann", "bob", None]),
        "project": chance.choice(["site", None]),
        "deadline_seconds": chance.choice([0.001, 5.0, 1e5, None]),
        "locks": chance.choice([["tree"], [], []]),
        "service_level": chance.choice(["premium", "economy", None, None]),
        "max_attempts": 50,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    pool.submit(chance.randint(1, 6), **JobRequest(command=["true"], **given).normal())  # type: ignore[arg-type]


def worked(bot: Bot, held: list[dict[str, object]], chance: random.Random) -> list[dict[str, object]]:
    """The bot ends some of what it has and takes what is offered."""
    ended = [work for work in held if chance.random() < 0.6]
    kept = [work for work in held if work not in ended]
    verdicts = ("succeeded", "succeeded", "failed")
    answer = bot.sync(*(completed(work, chance.choice(verdicts)) for work in ended), *map(active, kept))
    return [work for work in answer["leases"] if not work.get("stop")]


@pytest.mark.long
def test_all_at_once_every_job_comes_to_its_end(pool: Pool) -> None:
    chance = random.Random(0)
    pool.database.run(lambda c: counters.limit_all(c, {"owner:default:ann:cost": 12}))
    policy = priority_classes.Policy(starvation_seconds=0.001, max_queue_size=5)
    pool.database.run(lambda c: priority_classes.put_policy(c, policy, actor="test"))
    bots = [pool.bot(f"bot-{n}", capacity=4) for n in range(2)]
    assigners = [pool.assigner() for _ in range(3)]
    kinds = (OrderingSettings(), OrderingSettings(ageing_rate=900.0), OrderingSettings(kind="score"))
    for assigner, ordering in zip(assigners, kinds, strict=True):
        assigner.reconfigure(assigner._settings, assigner._quotas, Rules(ordering))
    upkeep, tide = pool.upkeep(), OverflowController(pool.database, name="test", now=clock.monotonic)
    # The loop alone may assign every job before it starves or before its deadline is near.
    for fields in ({"job_class": "background"}, {"deadline_seconds": 0.001}):
        pool.submit(**JobRequest(command=["true"], max_attempts=50, **fields).normal())
    reviewed = {"promote", "hasten", "at_risk"}
    eventually(lambda: upkeep.run_once() >= 0 and reviewed <= counted(pool).keys())
    held: list[list[dict[str, object]]] = [[], []]
    for step in range(300):
        submitting = step < 40
        if submitting:
            submitted(pool, chance)
        chance.choice(assigners).run_once()
        if step % 4 == 0:
            upkeep.run_once()
        tide.run_once()
        if submitting and step % 10 == 9:
            points = chance.randint(0, 100)
            pool.database.run(
                lambda c, points=points: priority_classes.put_classes(c, {"random": points}, actor="test")
            )
            reprice(pool.database, actor="test")
        if step == 60:
            pool.database.run(lambda c: counters.limit_all(c, {"owner:default:ann:cost": None}))
        held = [worked(bot, mine, chance) for bot, mine in zip(bots, held, strict=True)]
        if not submitting and not pool.rows("SELECT FROM jobs WHERE finished_at IS NULL LIMIT 1"):
            break
        if submitting and chance.random() < 0.2:
            jobs = pool.rows("SELECT public_id FROM jobs WHERE state IN ('queued', 'deferred') ORDER BY id LIMIT 3")
            ids = [str(row.public_id) for row in jobs]
            pool.database.run(lambda c, ids=ids: cancel(c, ids, instances=None, sync=1.0, actor="test"))
    assert pool.rows("SELECT state, count(*) FROM jobs WHERE finished_at IS NULL GROUP BY state") == []
