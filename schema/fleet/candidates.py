"""Candidates: free bots that could take a job now, as SQL finds and judges them.

Eligibility of a bot is one expression (`can_take`): it is of the job's cohort, it is free (healthy, with a session, not
draining, with room), it serves the instance, its room is enough, and its kind offers what the job requires. Assigners
know the fleet and draw from it in memory which bots to read.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from schema.postgres.connection import Connection
from schema.postgres.fragments import newest_version
from schema.postgres.statements import Statement
from schema.predicates import REQUIREMENTS, ROOM, can_take

# How a bot may serve an instance: for every one, for that one, for its pool. For bots of one kind each is one range of
# the indexes of bots, so that a few bots of one tenant are found among any number of others'.
_SERVING = (
    "instance IS NULL AND pool IS NULL",
    "instance = {want}.instance AND pool IS NULL",
    "instance IS NULL AND pool = {want}.pool",
)
#: The order of the indexes of bots. It is named in full, because the planner does not take what is null for constant.
BOTS_ORDER = "cohort, kind, instance, pool"
#: Kinds of bots up to which bots are looked up by kind. Of more kinds most are likely to have few bots, and one bot
#: after another is looked at.
FEW_KINDS = 1000
#: A recursive CTE with the kinds of which some bot is free: one step of a loose index scan for each kind and cohort.
FREE_KINDS = """free_kinds AS (
    (SELECT cohort, kind FROM bots WHERE free ORDER BY cohort, kind LIMIT 1)
    UNION ALL
    SELECT b.cohort, b.kind FROM free_kinds f CROSS JOIN LATERAL (
        SELECT cohort, kind FROM bots WHERE free AND (cohort, kind) > (f.cohort, f.kind)
        ORDER BY cohort, kind LIMIT 1) b
)"""
#: The condition on a kind that it is one of them. In this form it is evaluated with one look-up.
IS_FREE_KIND = "(kind IN (SELECT f.kind FROM free_kinds f)) IS TRUE"


def serving_bots(columns: str, want: str, *, which: str, limit: str) -> str:
    """A query of up to `limit` bots in each way of serving the instance of `want`, in its cohort, that are `which`."""
    return "\n UNION ALL ".join(
        f"(SELECT {columns} FROM bots WHERE {which} AND cohort = {want}.cohort AND {served.format(want=want)}"
        f" ORDER BY {BOTS_ORDER} LIMIT {limit})"
        for served in _SERVING
    )


def able_bots(columns: str, want: str, *, which: str, limit: str, among: str = "true") -> str:
    """A query of up to `limit` bots of the cohort of `want` that serve its instance, offer what it requires, and are
    `which`: a condition on the columns of `bots` that says `free`, or `status <> 'gone'`. `among`: a condition on the
    `kind` of all such bots."""
    few = f"(SELECT count(*) <= {FEW_KINDS} FROM (SELECT FROM kinds LIMIT {FEW_KINDS + 1}) n)"
    by_kind = serving_bots("*", want, which=f"{which} AND kind = k.offered", limit=limit)
    return f"""
    (SELECT {columns} FROM (
        SELECT kind AS offered FROM kind_platforms WHERE platform = {want}.platform AND {few} AND {among} OFFSET 0) k
    CROSS JOIN LATERAL ({by_kind}) b LIMIT {limit})
    UNION ALL
    (SELECT {columns} FROM ({serving_bots("*", want, which=which, limit="ALL")}) b
    WHERE NOT {few} AND {REQUIREMENTS.of(bot="b", want=want)} LIMIT {limit})"""


#: Free bots that are looked at for one that nobody else has locked.
MAX_BOTS_READ = 256


@dataclass(frozen=True)
class CandidateRequest:
    """Jobs that are alike for the choice of a bot, and how many candidates are wanted for them."""

    cohort: int
    instance: int
    platform: int
    units: int
    count: int


class FreeBot(NamedTuple):
    """A candidate: `free_units` is its free units when it was read, but for those that are kept for an instance;
    `capacity` all of its units."""

    id: int
    name: str
    priority: int
    free_units: int
    capacity: int


#: The columns of a `FreeBot`, of a row `b` of bots.
COLUMNS = "b.id, b.name, b.priority, b.capacity - b.in_use - b.kept_units AS room, b.capacity"
# Lateral subqueries with OFFSET 0 keep the planner from reading whole tables when its statistics are old or missing.
AMONG = Statement(f"""
SELECT {COLUMNS} FROM unnest(CAST(:bot_ids AS bigint[])) AS drawn (id)
CROSS JOIN LATERAL {newest_version("bots", "id", "drawn.id")} b WHERE b.free
""")
ALL_FREE = Statement(f"SELECT {COLUMNS} FROM bots b WHERE b.free AND b.cohort = ANY (CAST(:cohorts AS integer[]))")

_WANT = """
    SELECT CAST(:cohort AS integer) AS cohort, CAST(:instance AS integer) AS instance,
        CAST(:platform AS integer) AS platform, (SELECT pool FROM instances WHERE id = :instance) AS pool,
        CAST(:units AS integer) AS units"""
_ROOMY = ROOM.of(bot="", want="w")
#: Bots with room for a job `w` of any instance: what a bot keeps for one of them is no room.
ROOMY_FOR_ALL = "free AND capacity - in_use - kept_units >= w.units"
# The last resort: any free bot that nobody else has locked, and it stays locked until we are done.
ANY_FREE = Statement(f"""
WITH w AS MATERIALIZED ({_WANT}), near AS MATERIALIZED (
    SELECT n.id FROM w CROSS JOIN LATERAL ({able_bots("b.id", "w", which=ROOMY_FOR_ALL, limit=":look")}) n LIMIT :look
)
SELECT {COLUMNS}
FROM bots b CROSS JOIN w
WHERE b.id = ANY (ARRAY(SELECT id FROM near)) AND {can_take("b", "w")} AND {ROOMY_FOR_ALL}
ORDER BY b.priority, b.id LIMIT :count FOR NO KEY UPDATE OF b SKIP LOCKED
""")
SOME_FREE = Statement(f"""
WITH w AS MATERIALIZED ({_WANT})
SELECT n.* FROM w CROSS JOIN LATERAL ({able_bots(COLUMNS, "w", which=_ROOMY, limit=":count")}) n LIMIT :count
""")
IS_ANY_FREE = Statement(f"""
WITH w AS MATERIALIZED ({_WANT})
SELECT EXISTS (SELECT FROM w CROSS JOIN LATERAL ({able_bots("b.id", "w", which=ROOMY_FOR_ALL, limit="1")}) n)
""")

# Bots that keep units for the instance of the jobs. All units that such a bot keeps have to be free.
KEEPING = Statement(f"""
SELECT w.nth, b.id, b.name, b.kept_units
FROM (
    SELECT g.*, (SELECT i.pool FROM instances i WHERE i.id = g.instance) AS pool
    FROM unnest(CAST(:cohorts AS integer[]), CAST(:instances AS integer[]), CAST(:platforms AS integer[]),
                CAST(:units AS integer[])) WITH ORDINALITY AS g (cohort, instance, platform, units, nth)
    OFFSET 0
) w
CROSS JOIN LATERAL (
    SELECT * FROM bots WHERE kept_units >= w.units AND kept_units > 0 AND kept_for = w.instance
        AND kept_units <= capacity - in_use OFFSET 0) b
WHERE {can_take("b", "w")}
ORDER BY w.nth, b.kept_units, b.id
""")
POOLS_OF = Statement(
    "SELECT id, pool FROM instances WHERE id = ANY (CAST(:instances AS integer[])) AND pool IS NOT NULL"
)


def free_among(connection: Connection, bot_ids: Collection[int]) -> list[FreeBot]:
    """Those of these bots that are free, read without locks."""
    rows = connection.execute(AMONG, {"bot_ids": list(bot_ids)}).all() if bot_ids else []
    return [FreeBot._make(row) for row in rows]


def all_free(connection: Connection, cohorts: Collection[int]) -> list[FreeBot]:
    """All free bots of these cohorts, in the order of their ids, read without locks."""
    rows = connection.execute(ALL_FREE, {"cohorts": list(cohorts)}).all()
    return sorted(map(FreeBot._make, rows), key=itemgetter(0))


def any_free(connection: Connection, want: CandidateRequest, *, of_all: bool = False) -> list[FreeBot]:
    """Lock up to `want.count` free bots that could take one of the jobs and that are not locked by others.

    They are the first by priority, lower first, then by id: of some `MAX_BOTS_READ` of them, or of all. Units that a
    bot keeps for an instance are no room, as in a sample: the jobs may be of several instances.
    """
    values = {**_values(want), "count": want.count, "look": None if of_all else max(MAX_BOTS_READ, want.count)}
    rows = connection.execute(ANY_FREE, values).all()
    return [FreeBot._make(row) for row in rows]


def some_free(connection: Connection, want: CandidateRequest) -> list[FreeBot]:
    """Read up to `want.count` free bots that could take one of the jobs, without locks. Units that a bot keeps for the
    instance of the jobs are room."""
    rows = connection.execute(SOME_FREE, {**_values(want), "count": want.count}).all()
    return [FreeBot._make(row) for row in rows]


def is_any_free(connection: Connection, want: CandidateRequest) -> bool:
    """Whether a free bot could take one of the jobs. Units that a bot keeps are no room, as in `any_free`."""
    found: bool = connection.execute(IS_ANY_FREE, _values(want)).scalar_one()
    return found


def _values(want: CandidateRequest) -> dict[str, int]:
    return {"units": want.units, "cohort": want.cohort, "instance": want.instance, "platform": want.platform}


class KeepingBot(NamedTuple):
    """A bot that keeps so many units for an instance, all of which are free."""

    id: int
    name: str
    kept_units: int


def keeping(connection: Connection, wanted: Sequence[CandidateRequest]) -> list[list[KeepingBot]]:
    """Read, for each of `wanted`, the bots that keep enough units for one of the jobs, without locks."""
    rows = connection.execute(
        KEEPING,
        {
            "cohorts": [want.cohort for want in wanted],
            "instances": [want.instance for want in wanted],
            "platforms": [want.platform for want in wanted],
            "units": [want.units for want in wanted],
        },
    )
    found: list[list[KeepingBot]] = [[] for _ in wanted]
    for nth, *bot in rows.all():
        found[nth - 1].append(KeepingBot._make(bot))
    return found


def pools_of(connection: Connection, instances: Collection[int]) -> dict[int, str]:
    """The pools of those of the instances that are in one."""
    return {row.id: row.pool for row in connection.execute(POOLS_OF, {"instances": list(instances)})}
