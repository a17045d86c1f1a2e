"""Counters: stored amounts in use, and their limits.

The transaction that grants a lease charges its counters, up to their limits. The transaction that ends the lease gives
the charges back. A counter's name says what it counts: `instance:NAME:jobs` counts live leases, `instance:NAME:cost`
the cost within the rolling window including what is reserved for live leases, `lock:INSTANCE:NAME` the holders of a
lock, `bot:ID:RESOURCE` what is in use of a bot's CPU, memory, disk or GPUs, `bot:ID:gpu:NUMBER` the thousandths in use
of one of its GPUs. Counters are locked after quotas, in the order of their names.
"""

import json
from collections import Counter as Tally
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from types import MappingProxyType

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped

from schema import audit
from schema.accounting import limit_patterns
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement
from schema.predicates import HEALTHY, has_ready_jobs
from schema.validation import MAX_GPUS, RESOURCES, WHOLE_GPU, ResourceName, check_name

READ = Statement("""
SELECT name, used::double precision, most::double precision, slots::double precision, limited_by
FROM counters WHERE name = ANY (CAST(:names AS text[]))
""")
TAKE = Statement("""
SELECT charge(CAST(:names AS text[]), CAST(:amounts AS numeric[]), :may_overshoot, CAST(:numbers AS numeric[]))
""")
SETTLE = Statement("SELECT settle(CAST(:spent AS jsonb))")
# Each row is made or locked, in the order in which all lock them. This is one statement: a row that is there for one
# may be deleted before the next one locks it. Of a row that is there nothing is changed.
_HOLD = Statement("""
INSERT INTO counters AS c (name) SELECT name FROM unnest(CAST(:names AS text[])) AS w (name) ORDER BY name COLLATE "C"
ON CONFLICT (name) DO UPDATE SET used = c.used WHERE false
""")
_LIMIT = Statement("""
UPDATE counters c SET most = w.most, limited_by = CASE WHEN starts_with(c.name, 'lock:') THEN '' END
FROM unnest(CAST(:names AS text[]), CAST(:mosts AS numeric[])) AS w (name, most) WHERE c.name = w.name
""")
_SLOTS = Statement("""
UPDATE counters c SET slots = w.most
FROM unnest(CAST(:names AS text[]), CAST(:mosts AS numeric[])) AS w (name, most) WHERE c.name = w.name
""")
ROLL = Statement("SELECT roll_usage(:window, :limit, :tries)")

# Units in use and units available on healthy bots, in a minute in which jobs are ready. The first process to insert
# the minute's rows decides them.
SAMPLE = Statement(f"""
INSERT INTO usage (name, bucket, amount, rolled)
SELECT s.name, date_trunc('minute', clock_timestamp()), s.units, true
FROM (SELECT sum(in_use) AS busy, sum(capacity) AS available FROM bots WHERE {HEALTHY.of(bot="")}) b
CROSS JOIN LATERAL (VALUES ('pool:busy', b.busy), ('pool:available', b.available)) AS s (name, units)
WHERE s.units IS NOT NULL AND EXISTS (
    SELECT FROM queues q WHERE (q.schedule_after IS NULL OR q.schedule_after <= now()) AND {has_ready_jobs("q")})
ON CONFLICT (name, bucket) DO NOTHING
""")

# The same of each resource that healthy bots have declared, in thousandths or MiB. Whole GPUs that are in use also
# count as thousandths, whose counter only has what jobs share. Only names of bots' counters hold an id, so they are
# selected before it is read.
SAMPLE_RESOURCES = Statement(f"""
WITH declared AS MATERIALIZED (
    SELECT name, used, most FROM counters WHERE name LIKE 'bot:%' AND most > 0
), summed AS MATERIALIZED (
    SELECT v.resource, sum(v.used) AS busy, sum(v.most) AS available
    FROM declared d JOIN bots b ON b.id = CAST(split_part(d.name, ':', 2) AS bigint) AND {HEALTHY.of(bot="b")}
    CROSS JOIN LATERAL (
        SELECT split_part(d.name, ':', 3) AS resource, d.used, d.most
        UNION ALL
        SELECT 'gpu_milli', {WHOLE_GPU} * d.used, 0 WHERE split_part(d.name, ':', 3) = 'gpus') v
    WHERE v.resource <> 'gpu' GROUP BY 1
)
INSERT INTO usage (name, bucket, amount, rolled)
SELECT 'pool:' || r.resource || ':' || s.part, date_trunc('minute', clock_timestamp()), s.amount, true
FROM summed r CROSS JOIN LATERAL (VALUES ('busy', r.busy), ('available', r.available)) AS s (part, amount)
ON CONFLICT (name, bucket) DO NOTHING
""")


# A new session has nothing of what the one before it declared. Of bots with leases, what these have taken stays in use.
_FORGET_RESOURCES = Statement("""
DELETE FROM counters WHERE name = ANY (CAST(:names AS text[])) AND (used = 0 OR name <> ALL (CAST(:taken AS text[])))
""")
_UNLIMIT_RESOURCES = Statement("UPDATE counters SET most = NULL WHERE name = ANY (CAST(:taken AS text[]))")
_DECLARE_RESOURCES = Statement("""
INSERT INTO counters (name, most) SELECT * FROM unnest(CAST(:names AS text[]), CAST(:amounts AS numeric[])) AS d (n, a)
ON CONFLICT (name) DO UPDATE SET most = excluded.most
""")

#: No jobs give a number of slots.
NO_NUMBERS: Mapping[str, float] = MappingProxyType({})


@dataclass(slots=True)
class Counter:
    """An amount in use and its limit, None = unlimited. Callers also use it as a working copy.

    limited_by: of a lock, whence it has its limit: "" = set by its name, a prefix = by that pattern, None = by jobs.
    """

    used: float = 0.0
    most: float | None = None
    limited_by: str | None = None

    def leaves(self, amount: float) -> bool:
        """True if `amount` more may be taken. A limit that is reached refuses even an amount of 0."""
        return self.most is None or (self.used < self.most and self.used + amount <= self.most)


@dataclass(frozen=True)
class Settlement:
    """One lease that has ended.

    usage: what its bot reported as used, by unit. seconds: how long it ran, None if unknown. final: true if its job
    will not run again.
    """

    job_id: int
    fence: int
    usage: Mapping[str, float]
    seconds: float | None
    final: bool


def instance_counter(name: str, what: str) -> str:
    """The name of an instance's counter of `what`: jobs, cost or slots. Only a working copy has one of slots: each
    running job takes one, so that the number in use is that of `jobs`, whose row has the number of slots too."""
    return f"instance:{name}:{what}"


def stored_counter(name: str) -> str:
    """The name of the row that has this counter."""
    is_slots = name.startswith("instance:") and name.endswith(":slots")
    return f"{name.removesuffix('slots')}jobs" if is_slots else name


def lock_counter(instance: str, lock: str) -> str:
    """The name of the counter of one lock of an instance."""
    return f"lock:{instance}:{lock}"


def resource_counter(bot_id: int, resource: str) -> str:
    """The name of the counter of one of a bot's resources. It exists only for what the bot has declared; of anything
    else it has any amount. Whoever takes of such a counter or changes it holds the bot's row."""
    return f"bot:{bot_id}:{resource}"


def gpu_counter(bot_id: int, number: int) -> str:
    """The name of the counter of one of a bot's GPUs, in thousandths. The numbers begin at 0."""
    return f"bot:{bot_id}:gpu:{number}"


#: The last part of the name of every counter that a bot may have.
OF_BOTS = (*RESOURCES, *(f"gpu:{number}" for number in range(MAX_GPUS)))


def declare_resources(
    connection: Connection, supplies: Mapping[int, Mapping[ResourceName, int]], *, keeping: Collection[int] = ()
) -> None:
    """These bots, given by id, have so much, and any amount of what is not named. The caller has ended their leases.

    keeping: those among them with leases that could not end. What these have taken is in use until they end, even if it
    is more than what the bot has now.

    A bot with `gpus` has that many GPUs, each with a counter of its own. Of all of them together its jobs share as many
    thousandths as they have.
    """
    if not supplies:
        return
    names = [f"bot:{bot_id}:{each}" for bot_id in supplies for each in OF_BOTS]
    taken = [f"bot:{bot_id}:{each}" for bot_id in supplies if bot_id in keeping for each in OF_BOTS]
    connection.execute(_FORGET_RESOURCES, {"names": names, "taken": taken})
    if taken:
        connection.execute(_UNLIMIT_RESOURCES, {"taken": taken})
    most: dict[str, int] = {}
    for bot_id, supply in supplies.items():
        most |= {resource_counter(bot_id, name): amount for name, amount in supply.items()}
        if (gpus := supply.get("gpus")) is not None:
            most[resource_counter(bot_id, "gpu_milli")] = gpus * WHOLE_GPU
            most |= {gpu_counter(bot_id, number): WHOLE_GPU for number in range(gpus)}
    if most:
        connection.execute(_DECLARE_RESOURCES, {"names": list(most), "amounts": list(most.values())})


def declared_resources(
    connection: Connection, bot_ids: Sequence[int], resources: Sequence[ResourceName]
) -> dict[str, Counter]:
    """The counters of what these bots have declared of these resources, by name."""
    return read(connection, [resource_counter(bot_id, name) for bot_id in bot_ids for name in resources])


def declared_gpus(connection: Connection, numbers: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """What is left of each GPU, in thousandths, by bot. `numbers`: how many GPUs each of these bots has."""
    found = read(connection, [gpu_counter(bot_id, nth) for bot_id, gpus in numbers.items() for nth in range(gpus)])
    none = Counter(0.0, 0.0)
    return {
        bot_id: tuple(
            int((each.most or 0) - each.used)
            for each in (found.get(gpu_counter(bot_id, nth), none) for nth in range(gpus))
        )
        for bot_id, gpus in numbers.items()
    }


def read(connection: Connection, names: Sequence[str]) -> dict[str, Counter]:
    """The counters among `names` that exist, by name. If an instance has slots, its `slots` come with its `jobs`."""
    if not names:
        return {}
    found = dict[str, Counter]()
    for name, used, most, slots, limited_by in connection.execute(READ, {"names": list(names)}):
        found[name] = Counter(used, most, limited_by)
        if slots is not None:
            found[f"{name.removesuffix('jobs')}slots"] = Counter(used, slots)
    return found


def read_locks(connection: Connection, found: MutableMapping[str, Counter], numbers: Mapping[str, float]) -> None:
    """Give the counters of locks among `found` their limits, and add those of locks that have none yet.

    numbers: by counter name, the smallest number of slots that the waiting jobs themselves give the lock. It counts
    where no operator has set a limit, by name or by pattern. Of jobs that hold the lock, the smallest number counts.
    """
    by_pattern = limit_patterns.lock_limits(connection, [name for name in numbers if name not in found])
    for name, number in numbers.items():
        counter = found.get(name)
        if counter is None:
            counter = found[name] = Counter(0.0, *by_pattern.get(name, (number, None)))
        elif counter.limited_by is None:
            counter.most = number if counter.used == 0 or counter.most is None else min(counter.most, number)


def take(
    connection: Connection,
    amounts: Sequence[Mapping[str, float]],
    *,
    may_overshoot: bool = False,
    numbers: Mapping[str, float] = NO_NUMBERS,
) -> None:
    """Charge to their counters the amounts that leases take, given for each lease by counter name; all or nothing.

    numbers: the slots that jobs themselves give the locks among them; see `read_locks`.

    With `may_overshoot`, the last charge may exceed a cost limit that was not yet reached. If a limit was reached since
    it was read, raises psycopg.Error with the SQLSTATE of a serialization failure, so that `Database.run` repeats the
    transaction.
    """
    sums: dict[str, Decimal] = {}
    for (name, amount), times in Tally(chain.from_iterable([each.items() for each in amounts])).items():
        of_name = _exact(amount) if times == 1 else times * _exact(amount)
        sums[name] = sums[name] + of_name if name in sums else of_name
    last: dict[str, Decimal] = {}
    if may_overshoot:
        # The last charge is passed on its own, because only it may exceed a limit.
        for each in amounts:
            last |= {name: _exact(amount) for name, amount in each.items()}
        sums = {name: amount - last[name] for name, amount in sums.items()}
    if sums:
        # In the order in which the function locks them, so that it need not sort and sum them.
        parts = sorted([*sums.items(), *last.items()], key=itemgetter(0))
        names = [name for name, _ in parts]
        values = {"names": names, "amounts": [str(total) for _, total in parts], "may_overshoot": may_overshoot}
        own = [None if (number := numbers.get(name)) is None else repr(number) for name in names] if numbers else None
        connection.execute(TAKE, {**values, "numbers": own})


@lru_cache(1024)
def _exact(amount: float) -> Decimal:
    """The amount as it is written, so that sums here equal those in the database."""
    return Decimal(repr(amount))


def settle(connection: Connection, spent: Sequence[Settlement]) -> None:
    """Give back what these leases have taken. The caller has just ended them.

    The used part of a cost stays counted until it is older than the rolling window. It is what the bot reported in the
    unit of the instance's account. If the job has ended and the bot reported nothing, it is the estimate.
    """
    if spent:
        connection.execute(SETTLE, {"spent": json.dumps([asdict(each) for each in spent])})


def limit_all(connection: Connection, wanted: Mapping[str, float | None]) -> None:
    """Set the limits of counters, None = unlimited. An amount in use above the limit stays.

    It takes as many statements for many as for one.
    """
    if not wanted:
        return
    stored = sorted({stored_counter(name) for name in wanted})
    connection.execute_later(_HOLD, {"names": stored})
    for statement, is_slots in ((_LIMIT, False), (_SLOTS, True)):
        among = {
            stored_counter(name): most for name, most in wanted.items() if (stored_counter(name) != name) is is_slots
        }
        if among:
            mosts = [None if most is None else str(most) for most in among.values()]
            connection.execute(statement, {"names": list(among), "mosts": mosts})


def roll(connection: Connection, *, window: float, limit: int, tries: bool = False) -> int:
    """Take usage older than `window` seconds off the counters, at most `limit` rows of a minute; returns how many.

    tries: counters that somebody holds are passed over. Without it they are waited for, because one on which much is
    charged is held most of the time, shortly by each who does.
    """
    return int(connection.execute(ROLL, {"window": window, "limit": limit, "tries": tries}).scalar_one())


def sample(connection: Connection) -> None:
    """Record units and resources in use and available for this minute, if jobs are ready and no process has done it."""
    if connection.execute(SAMPLE).rowcount:
        connection.execute(SAMPLE_RESOURCES)


# Limits that operators set by name: of classes, and of the owners, projects and locks of an instance.


#: The largest cost, and the largest number of jobs, that a limit may be.
MAX_COST, MAX_JOBS = 1e12, 1_000_000_000

# Names contain no colon, so a counter's name splits into the names that an operator gave.
_LIST = Statement("""
SELECT name, used::double precision, most::double precision, limited_by FROM counters
WHERE CASE WHEN CAST(:name AS text) IS NOT NULL THEN name = :name
    ELSE name LIKE :pattern AND (most IS NOT NULL OR :unlimited) AND coalesce(limited_by, '') = '' END
ORDER BY name COLLATE "C"
""")
_HELD = Statement("""
SELECT name, most::double precision, limited_by FROM counters WHERE name = ANY (CAST(:names AS text[]))
ORDER BY name COLLATE "C" FOR NO KEY UPDATE
""")
# Without a limit of its own a lock has that of a pattern, or the smallest number of the jobs that hold it.
_RELEASE_LOCKS = Statement("""
UPDATE counters SET most = coalesce((limit_pattern(name)).most, 1), limited_by = (limit_pattern(name)).prefix
WHERE name = ANY (CAST(:names AS text[]))
""")
_KNOWN_CLASSES = Statement("SELECT name FROM job_classes WHERE name = ANY (CAST(:names AS text[]))")
# Jobs that name no instance belong to `default`, which has no row before the first of them.
_KNOWN_INSTANCES = Statement("""
SELECT name FROM instances WHERE name = ANY (CAST(:names AS text[])) UNION SELECT 'default'
""")


@dataclass(frozen=True)
class CounterFamily:
    """Counters that operators limit by names: of classes, owners, projects or locks.

    noun: its word in messages. first, last: the parts of the counter's name before and after the operator's names.
    names: how many names an operator gives. owner, known_owners: what the first of these names, and the query that
    tells which of them exist. unnamed: the limit where none is set; None = unlimited.
    """

    noun: str
    first: str
    names: int
    owner: str = "instance"
    known_owners: Statement = _KNOWN_INSTANCES
    last: str = ""
    unnamed: float | None = None

    def counter(self, names: Sequence[str]) -> str:
        """The counter's name for these operator's names."""
        return ":".join([self.first, *names, *([self.last] if self.last else [])])

    def named(self, counter: str) -> tuple[str, ...]:
        """The operator's names in a counter's name."""
        return tuple(counter.split(":")[1 : 1 + self.names])


JOBS_OF_CLASS = CounterFamily("class", "class", 1, owner="class", known_owners=_KNOWN_CLASSES, last="jobs")
COST_OF_OWNER = CounterFamily("owner", "owner", 2, last="cost")
COST_OF_PROJECT = CounterFamily("project", "project", 2, last="cost")
#: A lock has one slot unless an operator sets another number.
SLOTS_OF_LOCK = CounterFamily("lock", "lock", 2, unnamed=1.0)


@dataclass(frozen=True)
class CounterLimit:
    """The amount in use, including what is reserved for running jobs, and the limit `most`; None = unlimited.

    limited_by: see `Counter`.
    """

    names: tuple[str, ...]
    used: float
    most: float | None
    limited_by: str | None


def limits(connection: Connection, family: CounterFamily, *, names: Sequence[str] | None = None) -> list[CounterLimit]:
    """Every limit of a family, ordered by name. Locks that jobs have used are listed even without a limit, but for
    those that have it from a pattern. names: only that one, wherever it has its limit from."""
    values = {"pattern": family.counter(["%"] * family.names), "unlimited": family.unnamed is not None}
    rows = connection.execute(_LIST, {**values, "name": None if names is None else family.counter(names)})
    return [CounterLimit(family.named(row.name), row.used, row.most, row.limited_by) for row in rows]


def set_limits(
    connection: Connection,
    family: CounterFamily,
    wanted: Mapping[tuple[str, ...], float | None],
    *,
    actor: str,
    reason: str = "",
) -> None:
    """Set limits by their names; None = unlimited. An amount in use above its limit stays. It takes as many statements
    for many as for one, but that each pattern has its own.

    Raises BadInput, and NotFound for a class or an instance that does not exist: the limit of a misspelt name would
    hold for no job.
    """
    for (*owner, last), most in wanted.items():
        for name in owner:
            check_name("name", name)
        (limit_patterns.check if family is SLOTS_OF_LOCK else check_name)("name", last)
        if most is not None and not 0 <= most <= MAX_COST:
            raise BadInput("limit", f"must be between 0 and {MAX_COST:g}")
    owners = sorted({names[0] for names in wanted})
    known = set(connection.execute(family.known_owners, {"names": owners}).scalars())
    for name in owners:
        if name not in known:
            raise NotFound(f"{family.owner}: there is no {family.owner} '{name}'")
    counters = {family.counter(names): most for names, most in wanted.items()}
    # A change of patterns waits for other changes. It comes first, because nobody may wait so while it holds a row.
    for counter in [name for name in counters if limit_patterns.is_pattern(name)]:
        most = counters.pop(counter)
        limit_patterns.put_lock(connection, counter, 1.0 if most is None else most, actor=actor, reason=reason)
    if counters:
        limit_all(connection, counters)
        _note(connection, "limit.set", counters, actor=actor, reason=reason)


def remove_limits(
    connection: Connection, family: CounterFamily, wanted: Sequence[Sequence[str]], *, actor: str, reason: str = ""
) -> None:
    """Remove limits by their names; the default of their family applies again. Raises NotFound if one was not set."""
    named = {family.counter(names): "/".join(names) for names in wanted}
    for counter in [name for name in named if limit_patterns.is_pattern(name)]:
        del named[counter]
        limit_patterns.remove_lock(connection, counter, actor=actor, reason=reason)
    if not named:
        return
    is_lock = family is SLOTS_OF_LOCK
    if is_lock:
        connection.execute(limit_patterns.CHANGE_LOCKS)
    rows = connection.execute(_HELD, {"names": sorted(named)})
    held = {row.name for row in rows
            if (row.limited_by == limit_patterns.BY_NAME if is_lock else row.most is not None)}  # fmt: skip
    for counter, name in named.items():
        if counter not in held:
            raise NotFound(f"{family.noun}: '{escaped(name, 127)}' has no limit")
    removed = dict.fromkeys(named, family.unnamed)
    limit_all(connection, removed)
    if is_lock:
        connection.execute(_RELEASE_LOCKS, {"names": sorted(named)})
    _note(connection, "limit.rm", removed, actor=actor, reason=reason)


def _note(connection: Connection, action: str, limits: Mapping[str, float | None], *, actor: str, reason: str) -> None:
    noted = {counter: {"most": most, "reason": reason} for counter, most in limits.items()}
    audit.write_all(connection, action, noted, actor=actor)
    wake(connection, "jobs")
