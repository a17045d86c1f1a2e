"""Pages of jobs by filters, in one of five orders. No page reads more than a bounded number of rows.

The one exception is a walk by priority: its bound holds for each queue, and what rests is read whole.

There are two ways to a page. If a condition of the filter, such as a state in which few jobs are or a value of
metadata, leaves at most 10,000 jobs by an index, these are read and sorted: any filter goes with any order then.
Otherwise the page **walks**: it reads the next 10,000 jobs in the asked order, which an index has, and keeps those
that pass. A page of a walk may therefore hold fewer jobs than asked for and still have a next one. There is no index
for each filter, because each would be written with every change of a job.

A cursor holds the sort key of the last job that was read, whose row id is hidden. The next page begins after it,
whatever came or ended meanwhile, so no job whose key stays comes twice or is left out.
"""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from leasehold.errors import BadInput
from leasehold.states import FINAL, WAITING, JobState

from assigner.queries import cursors, status
from assigner.queries.jobs import LAST_BOT, ROW, TASK_OF_CALL
from schema.filters import Direction, JobFilter, Sort, default_direction, default_sort, pair
from schema.postgres.connection import Connection
from schema.postgres.fragments import DESCRIBED
from schema.postgres.statements import Statement
from schema.predicates import AT_REST, ready_in, ready_queues
from schema.sql import LIVE, NOT_OVER


@dataclass(frozen=True)
class Bounds:
    """How much one page may read.

    few: jobs that are read and sorted. examined: jobs of a walk that are looked at. of_queue: the same of each queue,
    for the order in which no single index has the jobs of all queues.
    """

    few: int = 10_000
    examined: int = 10_000
    of_queue: int = 1_000


BOUNDS = Bounds()
#: How long the transaction of a submit may last: longer, and a walk that is bounded by times may miss its jobs.
LONGEST_SUBMIT = timedelta(hours=1)
#: Version of the public ids that begin with their time.
VERSION = 7


#: The columns that each order goes by, all in one direction, and their types. The id makes each order total.
KEYS: Mapping[Sort, Mapping[str, str]] = {
    Sort.SUBMITTED: {"id": "bigint"},
    Sort.QUEUED: {"queued_at": "timestamptz", "id": "bigint"},
    Sort.STARTED: {"started_at": "timestamptz", "id": "bigint"},
    Sort.ENDED: {"finished_at": "timestamptz", "id": "bigint"},
    Sort.PRIORITY: {"rank": "float8", "queued_at": "timestamptz", "id": "bigint"},
}
#: Names of times in a filter, and the columns that hold them.
TIMES = {"submitted": "created_at", "queued": "queued_at", "started": "started_at", "ended": "finished_at"}

# What the names of a filter stand for. Each is a row of a small table.
VISIBLE = Statement("""
SELECT id FROM instances i
WHERE (CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[])))
    AND (CAST(:instance AS text) IS NULL OR i.name = :instance)
""")
COHORT = Statement("SELECT id FROM cohorts WHERE name = :name")
BOT = Statement("SELECT id FROM bots WHERE name = :name")
QUEUES = Statement("""
SELECT q.id FROM queues q JOIN platforms p ON p.id = q.platform LEFT JOIN constraint_sets s ON s.id = q.constraint_set
WHERE (CAST(:instances AS integer[]) IS NULL OR q.instance = ANY (CAST(:instances AS integer[])))
    AND (CAST(:cohort AS integer) IS NULL OR q.cohort = :cohort)
    AND p.properties @> CAST(:properties AS jsonb)
    AND (CAST(:terms AS jsonb) = '{}' OR s.terms @> CAST(:terms AS jsonb))
""")
# Of these queues, all of them for null, those with queued jobs that no present bot could run. Queues are alike by what
# their jobs need, so few of these have to be compared with bots.
UNMATCHABLE = Statement(f"""
WITH RECURSIVE {ready_queues("plain")}, {ready_queues("constrained", constrained=True)}, holding AS MATERIALIZED (
    SELECT k.id, k.cohort, k.instance, i.pool, coalesce(k.required, k.platform) AS platform, k.units
    FROM queues k JOIN instances i ON i.id = k.instance
    WHERE k.id = ANY (ARRAY(
            SELECT queue FROM plain UNION ALL SELECT queue FROM constrained
            UNION SELECT queue FROM (SELECT queue FROM jobs WHERE {AT_REST} ORDER BY schedule_after LIMIT :most) r))
        AND (CAST(:queues AS integer[]) IS NULL OR k.id = ANY (CAST(:queues AS integer[])))
), lacking AS MATERIALIZED (
    SELECT q.cohort, q.instance, q.platform, q.units
    FROM (SELECT DISTINCT cohort, instance, pool, platform, units FROM holding) q WHERE {status.UNMATCHABLE}
)
SELECT h.id FROM holding h JOIN lacking USING (cohort, instance, platform, units)
""")
# The first job whose id was made at this time or later. Ids begin with the time (RFC 9562, version 7).
FIRST_SINCE = Statement("""
SELECT id, public_id FROM jobs WHERE public_id >= CAST(:since AS uuid) ORDER BY public_id LIMIT 1
""")


@dataclass(frozen=True)
class Page:
    """Jobs of a list in its order. `next` is the cursor of the page that follows; None if this one is the last."""

    jobs: Sequence[dict[str, Any]]
    next: str | None


@dataclass(frozen=True)
class Request:
    """What a page is asked for. `before` is a row id, below which all jobs of the page are; `cursor` is that of the
    page before."""

    filters: JobFilter
    sort: Sort
    direction: Direction
    limit: int
    before: int | None = None
    cursor: str | None = None

    @classmethod
    def of(
        cls,
        filters: JobFilter,
        *,
        limit: int,
        sort: Sort | None = None,
        direction: Direction | None = None,
        before: int | None = None,
        cursor: str | None = None,
    ) -> "Request":
        """Choose the order if none is asked for. Jobs that no bot could run are queued, whatever else is asked."""
        sort = sort or default_sort(filters)
        if filters.unmatchable and JobState.QUEUED in (filters.state or [JobState.QUEUED]):
            filters = filters.model_copy(update={"state": [JobState.QUEUED]})
        return cls(filters, sort, direction or default_direction(sort), limit, before, cursor)

    @property
    def common(self) -> str:
        """Everything that the pages of one list have in common."""
        fields = {name: str(value) for name, value in sorted(self.filters.filter_fields().items())}
        return json.dumps([fields, self.sort, self.direction, self.before])


def page(connection: Connection, request: Request, *, instances: Sequence[str] | None, bounds: Bounds = BOUNDS) -> Page:
    """One page of the jobs of `instances`, None for all, that pass the filter.

    Raises BadInput for a cursor that no page of this list gave, and if no index has the jobs in the asked order and
    more than `bounds.few` may pass.
    """
    after = None
    if request.cursor is not None:
        after = cursors.decode(connection, request.cursor, kinds=[*KEYS[request.sort].values()], of=request.common)
    found = _resolve(connection, request.filters, instances)
    states = set(request.filters.state)
    if found is None or (request.sort is Sort.ENDED and states and not states & FINAL):
        return Page([], None)
    search = _Search(request, found, after, bounds)
    few = _few(connection, search)
    if few is not None:
        search.values["ids"] = few
        walk = _Walk(f"{_JOBS} AND j.id = ANY (CAST(:ids AS bigint[]))", bounds.few)
        return _read(connection, search, walk, edge=None)
    walk = _walk(connection, search)
    passes_all = all(condition in walk.query for condition in search.conditions)
    return _read(connection, search, walk, edge=None if passes_all else _edge(connection, search, walk))


# The names of a filter as ids


@dataclass(frozen=True)
class _Resolved:
    """The ids that a filter names; None where it says nothing. `visible`: all instances that the caller may see."""

    visible: Sequence[int]
    instances: Sequence[int] | None
    cohort: int | None
    queues: Sequence[int] | None
    bot: int | None


def _resolve(connection: Connection, given: JobFilter, instances: Sequence[str] | None) -> _Resolved | None:
    """None if the filter names something that is not there, so that no job passes."""
    names = None if instances is None else list(instances)
    visible = list(connection.execute(VISIBLE, {"instances": names, "instance": given.instance}).scalars())
    restricted = None if names is None and given.instance is None else visible
    cohort, bot = (
        None if name is None else connection.execute(query, {"name": name}).scalar_one_or_none()
        for query, name in ((COHORT, given.cohort), (BOT, given.bot))
    )
    if not visible or (given.cohort is not None and cohort is None) or (given.bot is not None and bot is None):
        return None
    properties: dict[str, list[str]] = {}
    for key, value in map(pair, given.properties):
        properties.setdefault(key, []).append(value)
    terms = {name: value for name in ("job_class", "owner", "project") if (value := getattr(given, name)) is not None}
    queues = None
    if restricted is not None or cohort is not None or properties or terms:
        values = {"properties": json.dumps(properties), "terms": json.dumps(terms)}
        queues = list(connection.execute(QUEUES, values | {"instances": restricted, "cohort": cohort}).scalars())
    if given.unmatchable:
        if given.state != [JobState.QUEUED]:
            return None
        wanted = {"queues": queues, "most": status.MAX_COUNTED}
        queues = list(connection.execute(UNMATCHABLE, wanted).scalars())
    return _Resolved(visible, restricted, cohort, queues, bot) if queues is None or queues else None


# The conditions of a page


class _Search:
    """A request with the ids that it names: its conditions on a job `j`, and where it goes on."""

    def __init__(self, request: Request, found: _Resolved, after: Sequence[Any] | None, bounds: Bounds) -> None:
        self.request, self.found, self.bounds = request, found, bounds
        self.values: dict[str, Any] = {"visible": list(found.visible), "queues": found.queues}
        self.keys = KEYS[request.sort]
        self.conditions = self._conditions()
        self.after = "true" if after is None else self.compared("after", after, (">", "<"))

    def _conditions(self) -> list[str]:
        given, found = self.request.filters, self.found
        tests: dict[str, tuple[str, Any]] = {
            "instances": ("j.instance = ANY (CAST({} AS integer[]))", found.instances),
            "cohort": ("j.cohort = {}", found.cohort),
            "bot": ("{} = (SELECT bot_id FROM leases WHERE job_id = j.id ORDER BY fence DESC LIMIT 1)", found.bot),
            "states": ("j.state = ANY (CAST({} AS text[]))", [state.value for state in given.state] or None),
            "label": ("j.label = {}", given.label),
            "task": (f"{TASK_OF_CALL} = {{}}", given.task),
            "min_priority": ("j.priority >= {}", given.min_priority),
            "max_priority": ("j.priority <= {}", given.max_priority),
            "before": ("j.id < {}", self.request.before),
        }
        if given.properties or given.job_class or given.owner or given.project or given.unmatchable:
            tests["queues"] = ("j.queue = ANY (CAST({} AS integer[]))", found.queues)
        for name, column in TIMES.items():
            tests[f"{name}_after"] = (f"j.{column} >= {{}}", getattr(given, f"{name}_after"))
            tests[f"{name}_before"] = (f"j.{column} < {{}}", getattr(given, f"{name}_before"))
        for nth, (key, value) in enumerate(map(pair, given.metadata)):
            self.values[f"key_{nth}"] = key
            described = f"job_id = j.id AND key = :key_{nth} AND value = {{}}"
            tests[f"value_{nth}"] = (f"EXISTS (SELECT FROM {DESCRIBED} d WHERE {described} OFFSET 0)", value)
        asked = {name: test for name, test in tests.items() if test[1] is not None}
        self.values |= {name: value for name, (_, value) in asked.items()}
        return [sql.format(f":{name}") for name, (sql, _) in asked.items()]

    def conditions_on(self, column: str) -> list[str]:
        """The conditions that compare this column of a job."""
        return [condition for condition in self.conditions if condition.startswith(f"j.{column} ")]

    def columns(self, row: str) -> str:
        """The columns of the key."""
        return ", ".join(f"{row}.{column}" for column in self.keys)

    def order(self, row: str) -> str:
        """The ORDER BY of a row that has the columns of the key."""
        down = " DESC" if self.request.direction is Direction.DESCENDING else ""
        return ", ".join(f"{row}.{column}{down}" for column in self.keys)

    def compared(self, name: str, key: Sequence[Any], operators: tuple[str, str]) -> str:
        """The comparison of a job `j` with a key, by the operator for ascending or that for descending order."""
        self.values |= {f"{name}_{nth}": value for nth, value in enumerate(key)}
        values = ", ".join(f"CAST(:{name}_{nth} AS {kind})" for nth, kind in enumerate(self.keys.values()))
        return f"({self.columns('j')}) {operators[self.request.direction is Direction.DESCENDING]} ({values})"


# Few jobs, by one condition of the filter


#: The jobs in a state that is not final, from an index that has no others.
_IN_STATE: Mapping[JobState, str] = {
    JobState.BLOCKED: "SELECT job_id AS id FROM graph_nodes WHERE outcome IS NULL",
    JobState.PARKED: "SELECT id FROM jobs WHERE state = 'parked'",
    JobState.DEFERRED: "SELECT id FROM jobs WHERE state = 'deferred'",
}
_HELD = f"SELECT job_id AS id FROM leases WHERE {LIVE}"
_HELD_BY = f"SELECT job_id AS id FROM leases WHERE bot_id = :bot AND {NOT_OVER}"
_READY = f"""
    SELECT r.id FROM queues q CROSS JOIN LATERAL (SELECT id FROM jobs WHERE {ready_in("q")} LIMIT :few OFFSET 0) r
    WHERE CAST(:queues AS integer[]) IS NULL OR q.id = ANY (CAST(:queues AS integer[]))"""
_RESTING = f"SELECT id FROM jobs WHERE {AT_REST}"
_LABELLED = "SELECT id FROM jobs WHERE label = :label AND label <> '' AND state = '{}'"
_OF_VALUE = f"""
    SELECT m.id FROM unnest(CAST(:visible AS integer[])) i (id) CROSS JOIN LATERAL (
        SELECT job_id AS id FROM {DESCRIBED} d
        WHERE instance = i.id AND key = :key_{{nth}} AND value = :value_{{nth}} LIMIT :few) m"""


def _few(connection: Connection, search: _Search) -> list[int] | None:
    """The ids of all jobs that one condition of the filter leaves, if an index has them and they are few."""
    most = search.bounds.few
    for parts in _selective(search):
        source = " UNION ALL ".join(f"(SELECT id FROM ({part}) p LIMIT :few)" for part in parts)
        rows = connection.execute(
            Statement(f"SELECT id FROM ({source}) s LIMIT :few"), search.values | {"few": most + 1}
        )
        ids = list(rows.scalars())
        if len(ids) <= most:
            return ids
    return None


def _selective(search: _Search) -> Iterator[list[str]]:
    """Queries for each condition that an index can answer alone; each row that they read is a job of the answer."""
    given = search.request.filters
    for nth in range(len(given.metadata)):
        yield [_OF_VALUE.format(nth=nth)]
    states = set(given.state)
    if states and not states & FINAL:
        yield _in_states(search, states)
    if ended := search.conditions_on("finished_at"):
        yield [" AND ".join(["SELECT id FROM jobs j WHERE j.finished_at IS NOT NULL", *ended])]
    if not _has_walk(search.request):
        yield ["SELECT id FROM jobs"]


def _has_walk(request: Request) -> bool:
    """True if an index has any number of jobs in the asked order."""
    is_of_queues = request.sort is Sort.PRIORITY and set(request.filters.state) == {JobState.QUEUED}
    return is_of_queues or request.sort in (Sort.SUBMITTED, Sort.ENDED)


def _in_states(search: _Search, states: AbstractSet[JobState]) -> list[str]:
    if search.found.bot is not None and states.isdisjoint(WAITING):
        return [_HELD_BY]
    parts = set()
    for state in states:
        if search.request.filters.label and state in (JobState.QUEUED, JobState.PARKED):
            parts.add(_LABELLED.format(state))
        elif state is JobState.QUEUED:
            parts |= {_READY, _RESTING}
        else:
            parts.add(_IN_STATE.get(state, _HELD))
    return sorted(parts)


# Many jobs, in the order of an index


@dataclass(frozen=True)
class _Walk:
    """A query of jobs `j` in no order, with places for a window of keys and, if it reads jobs only, for columns.

    examined: jobs that a page looks at, in the asked order.
    """

    query: str
    examined: int

    @property
    def reads_jobs(self) -> bool:
        """False if the query gives the columns of the key only."""
        return "{columns}" in self.query


def _walk(connection: Connection, search: _Search) -> _Walk:
    """The walk in the asked order. Raises BadInput if no index has the jobs in this order."""
    given, sort, examined = search.request.filters, search.request.sort, search.bounds.examined
    if not _has_walk(search.request):
        raise BadInput(
            "sort",
            f"by {sort} takes a filter that at most {search.bounds.few:,} jobs pass, such as a state or metadata"
            + ("; of the queued jobs alone it lists any number" if sort is Sort.PRIORITY else ""),
        )
    if sort is Sort.ENDED:
        ended = search.conditions_on("finished_at")
        return _Walk(" AND ".join([_JOBS, "j.finished_at IS NOT NULL", *ended]), examined)
    if sort is Sort.SUBMITTED and given.metadata:
        return _Walk(_OF_METADATA.format(window="{window}", order=search.order("j")), examined)
    if sort is Sort.SUBMITTED:
        bounds = [*search.conditions_on("id"), *_bounds(connection, search)]
        return _Walk(" AND ".join([_JOBS, *bounds]), examined)
    return _Walk(_OF_QUEUES.format(window="{window}", order=search.order("j")), search.bounds.of_queue)


_JOBS = "SELECT {columns} FROM jobs j WHERE {window}"
_OF_METADATA = f"""
    SELECT m.id FROM unnest(CAST(:visible AS integer[])) i (id) CROSS JOIN LATERAL (
        SELECT j.id FROM (
            SELECT job_id AS id FROM {DESCRIBED} d WHERE instance = i.id AND key = :key_0 AND value = :value_0) j
        WHERE {{window}} ORDER BY {{order}} LIMIT CAST(:examined AS bigint)) m"""
# What rests is in no index by rank. It is read whole.
_OF_QUEUES = f"""
    SELECT r.* FROM queues q CROSS JOIN LATERAL (
        SELECT j.rank, j.queued_at, j.id FROM jobs j
        WHERE {ready_in("q")} AND {{window}} ORDER BY {{order}} LIMIT CAST(:examined AS bigint)) r
    WHERE CAST(:queues AS integer[]) IS NULL OR q.id = ANY (CAST(:queues AS integer[]))
    UNION ALL
    (SELECT j.rank, j.queued_at, j.id FROM jobs j WHERE {AT_REST} AND {{window}}
     ORDER BY {{order}} LIMIT CAST(:examined AS bigint))"""


def _bounds(connection: Connection, search: _Search) -> list[str]:
    """Conditions on ids that follow from the times of a filter: nothing queues, starts or ends before its submit."""
    given, found = search.request.filters, []
    before = [moment for name in TIMES if (moment := getattr(given, f"{name}_before")) is not None]
    if given.submitted_after is not None:
        found.append((">=", "since", _since_1970(given.submitted_after) - LONGEST_SUBMIT))
    if before:
        found.append(("<", "until", _since_1970(min(before)) + LONGEST_SUBMIT))
    bounds = []
    for operator, name, since_1970 in found:
        first = connection.execute(FIRST_SINCE, {"since": _first_id(since_1970)}).one_or_none()
        if first is None and name == "since":
            bounds.append("false")
        # An id of another version says nothing about its time.
        elif first is not None and uuid.UUID(str(first.public_id)).version == VERSION:
            search.values[name] = first.id
            bounds.append(f"j.id {operator} :{name}")
    return bounds


def _since_1970(moment: datetime) -> timedelta:
    """A duration, because an hour before or after it may lie beyond the years that a datetime can hold."""
    return moment - datetime(1970, 1, 1, tzinfo=UTC)


def _first_id(since_1970: timedelta) -> str:
    """The lowest public id of this moment."""
    milliseconds = max(0, int(since_1970 / timedelta(milliseconds=1)))
    return str(uuid.UUID(int=(milliseconds % (1 << 48) << 80) + (VERSION << 76)))


def _edge(connection: Connection, search: _Search, walk: _Walk) -> Sequence[Any] | None:
    """The key of the last job that this page looks at; None if it looks at all that are left.

    It is read before the page, so that a job which appears in between makes the page longer and not shorter.
    """
    query = walk.query.format(columns=search.columns("j"), window=search.after)
    statement = Statement(
        f"SELECT {search.columns('k')} FROM ({query}) k ORDER BY {search.order('k')} OFFSET :skipped LIMIT 1"
    )
    values = {**search.values, "examined": walk.examined, "skipped": walk.examined - 1}
    row = connection.execute(statement, values).one_or_none()
    return None if row is None else tuple(row)


# The page


_PAGE = """
WITH page AS MATERIALIZED (
    SELECT {distinct} {key} FROM {jobs} WHERE {conditions} ORDER BY {order} LIMIT :limit
)
SELECT n.id, {row}, {named_key}, coalesce(
    (SELECT jsonb_object_agg(key, value) FROM {described}), '{{}}') AS metadata
FROM page k CROSS JOIN LATERAL (SELECT * FROM jobs WHERE id = k.id OFFSET 0) j JOIN instances i ON i.id = j.instance
CROSS JOIN LATERAL ({submission}) n
{last_bot}
ORDER BY {page_order}
"""
_OWN = "SELECT j.public_id AS id", "job_metadata WHERE job_id = k.id"
# The submission with the asked metadata, one that still counts if there is one: who cancels what is listed means that.
_OF_SUBMISSION = """
    SELECT o.id FROM (
        SELECT j.public_id AS id, j.abandoned_at AS withdrawn_at, 0 AS nth
        WHERE EXISTS (SELECT FROM job_metadata WHERE job_id = j.id AND key = :key_0 AND value = :value_0)
        UNION ALL
        SELECT d.submission, f.cancelled_at, 1 FROM submission_metadata d JOIN job_followers f ON public_id = submission
        WHERE d.job_id = j.id AND d.key = :key_0 AND d.value = :value_0) o
    ORDER BY o.withdrawn_at IS NOT NULL, o.nth, o.id LIMIT 1"""
_ITS_METADATA = """(
        SELECT key, value FROM job_metadata WHERE job_id = k.id AND n.id = j.public_id
        UNION ALL SELECT key, value FROM submission_metadata WHERE submission = n.id) d"""


def _read(connection: Connection, search: _Search, walk: _Walk, edge: Sequence[Any] | None) -> Page:
    """The page of a walk, up to its edge."""
    window = search.after if edge is None else f"{search.after} AND {search.compared('edge', edge, ('<=', '>='))}"
    query = walk.query.format(columns="j.*", window=window)
    jobs, ordered = f"({query}) j", "j"
    if not walk.reads_jobs:
        jobs, ordered = f"({query}) w CROSS JOIN LATERAL (SELECT * FROM jobs WHERE id = w.id OFFSET 0) j", "w"
    submission, described = (_OF_SUBMISSION, _ITS_METADATA) if search.request.filters.metadata else _OWN
    has_key = [f"j.{column} IS NOT NULL" for column in search.keys]
    statement = Statement(
        _PAGE.format(
            key=search.columns(ordered),
            jobs=jobs,
            conditions=" AND ".join([*has_key, *search.conditions]),
            order=search.order(ordered),
            row=ROW,
            distinct="DISTINCT" if search.request.filters.metadata else "",
            submission=submission,
            described=described,
            named_key=", ".join(f"k.{column} AS key_{nth}" for nth, column in enumerate(search.keys)),
            last_bot=LAST_BOT,
            page_order=search.order("k"),
        )
    )
    limit = search.request.limit
    values = {**search.values, "examined": None, "limit": limit + 1}
    rows = [dict(row) for row in connection.execute(statement, values).mappings()]
    key = [rows[limit - 1][f"key_{nth}"] for nth in range(len(search.keys))] if len(rows) > limit else edge
    return Page(rows[:limit], None if key is None else cursors.encode(connection, key, of=search.request.common))
