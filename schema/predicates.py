"""Named SQL predicates: every hard condition on a job, its instance, its bot and the pool; and where ready jobs are.

The picks, the reads of candidate bots and the grant join these expressions. `explain` evaluates the same expressions
for one job and shows the evidence. Write a new condition as a predicate here.
"""

from dataclasses import dataclass

from schema.timing import DEAD_AFTER


@dataclass(frozen=True)
class Predicate:
    """One condition: its name, an SQL expression that is true while it is met, and the requirement in words for people.

    In the expression `{job}`, `{instance}`, `{assigner}`, `{bot}` and `{want}` stand for rows.
    `{headroom}` stands for the units that a quota leaves, NULL for any number.
    """

    name: str
    sql: str
    requirement: str

    def of(self, *, headroom: str = "", **rows: str) -> str:
        """The expression for rows with these aliases. An empty alias leaves the columns unqualified."""
        return self.sql.format(headroom=headroom, **{kind: f"{row}." if row else "" for kind, row in rows.items()})


def offered(*, platform: str, kind: str) -> str:
    """A query of one row if bots of this kind offer what this requirement set asks for, and are open to it.

    The two are compared as a pair, which fits the primary key and no other index. By its columns the row could be found
    in the index of kinds too: while statistics are old the planner takes that for equally good, and it holds all
    requirement sets of the kind.
    """
    pair = f"({platform}, {kind})"
    return f"SELECT FROM kind_platforms o WHERE (o.platform, o.kind) >= {pair} AND (o.platform, o.kind) <= {pair}"


# On the job, its instance and its quota. A pick need not test dependencies, because a blocked job is not queued.
DEPENDENCIES = Predicate(
    "dependencies", "{job}state <> 'blocked'", "what it depends on in its graph has ended as it asks"
)
STATE = Predicate("state", "{job}state = 'queued'", "it waits, and is neither held aside nor over")
BACKOFF = Predicate(
    "backoff",
    "{job}schedule_after IS NULL",
    "its earliest start is past, and neither it nor its queue rests after a failure",
)
#: Some label or task is paused. Inside a statement it is asked once.
ANY_PAUSE = "EXISTS (SELECT FROM pauses WHERE kind IN ('label', 'task'))"
PAUSE = Predicate(
    "pause",
    f"(NOT {ANY_PAUSE} OR (pause_of({{job}}id, {{job}}label, {{job}}instance)).kind IS NULL)",
    "neither its label nor its task is paused",
)
DRAIN = Predicate("drain", "NOT {instance}draining", "its instance is not being drained")
QUOTA = Predicate(
    "quota", "({headroom} IS NULL OR {job}units <= {headroom})", "its instance's quota leaves enough units"
)

# On a bot, for a job or queue `want`: a row that also has the pool of its instance. Each predicate is tested on the
# bots that passed those before it. Cohorts are compared by an expression that matches no index, because the bot has
# already been found.
COHORT = Predicate("cohort", "{bot}cohort IS NOT DISTINCT FROM {want}cohort", "its cohort has healthy bots")
REQUIREMENTS = Predicate(
    "requirements",
    f"EXISTS ({offered(platform='{want}platform', kind='{bot}kind')} OFFSET 0)",
    "a bot of the cohort offers what it requires",
)
SERVES = Predicate(
    "instance",
    "({bot}instance IS NULL AND {bot}pool IS NULL OR {bot}instance = {want}instance OR {bot}pool = {want}pool)",
    "such a bot serves its instance",
)
# A bot that has opened a session may never learn of it. Only its first sync shows that it works.
HEALTHY = Predicate(
    "healthy",
    "{bot}status = 'ok' AND NOT {bot}draining AND NOT {bot}closing AND {bot}sync_seq > 0",
    "such a bot is healthy and takes work",
)
PROBATION = Predicate(
    "probation",
    "({bot}probation_until IS NULL OR {bot}in_use = 0)",
    "such a bot is not on probation, or holds nothing",
)
UNITS = Predicate("units", "{bot}capacity >= {want}units", "such a bot is large enough")
# What preemption frees on a bot is kept for one instance. That instance gets it once all of it is free, so that small
# jobs do not take what is being gathered for a large one.
_ROOM_FOR = (
    "{bot}capacity - {bot}in_use - CASE WHEN {bot}kept_for = {want}instance"
    " AND {bot}kept_units <= {bot}capacity - {bot}in_use THEN 0 ELSE {bot}kept_units END"
)
ROOM = Predicate("room", f"{{bot}}free AND {_ROOM_FOR} >= {{want}}units", "such a bot has room")

# On the pool, for a job `want`: a row with the name of its cohort and, as `peers`, the names of its instance and of all
# instances of the same pool.
_ASSIGNER_IS_PLACING = (
    "{assigner}stopped_at IS NULL AND NOT {assigner}draining"
    f" AND {{assigner}}seen_at > clock_timestamp() - interval '{DEAD_AFTER:g} s'"
)
ASSIGNERS = Predicate(
    "assigners",
    f"{_ASSIGNER_IS_PLACING} AND EXISTS (SELECT FROM jsonb_array_elements({{assigner}}serves) entry"
    " WHERE (coalesce(entry -> 'cohorts', 'null') = 'null' OR entry -> 'cohorts' ? {want}cohort_name)"
    " AND (coalesce(entry -> 'instances', 'null') = 'null' OR entry -> 'instances' ?| {want}peers))",
    "an assigner at work serves its cohort, and its instance or another of its pool",
)
#: Shown by `explain` only: a job past its deadline may start until upkeep has ended it.
QUEUE_DEADLINE = Predicate("queue deadline", "true", "it may still wait")

#: A ready job, as the index `jobs_of_queue` states it; its queue may rest nevertheless. Every job has units: the words
#: keep this index from reads in the order of the front, whatever statistics the planner has.
READY = f"{STATE.of(job='')} AND {BACKOFF.of(job='')} AND units >= 1"
#: A ready job without constraints, and one with constraints: the two halves of that index.
READY_PLAIN, READY_CONSTRAINED = f"NOT constrained AND {READY}", f"constrained AND {READY}"
#: A ready job without constraints, as the index `jobs_front` states it: for reads of a whole cohort in its order. No
#: priority is lower: the words keep this index from reads of one queue.
IN_FRONT = f"{STATE.of(job='')} AND {BACKOFF.of(job='')} AND NOT constrained AND priority >= -1000"
#: The same of jobs with constraints, as the index `jobs_constrained_front` states it.
IN_CONSTRAINED_FRONT = f"{STATE.of(job='')} AND {BACKOFF.of(job='')} AND constrained AND priority >= -1000"
#: READY in an expression that matches no index, so that the planner must use the primary key.
STILL_READY = f"{STATE.of(job='')} AND coalesce(schedule_after, '-infinity') = '-infinity'"
#: Leases `l` that are live, pending and running, in words that match no index of live leases: a statement that has the
#: primary key of each uses that.
STILL_LIVE = "l.ended_at IS NULL"
STILL_PENDING = f"{STILL_LIVE} AND l.state IS NOT DISTINCT FROM 'pending'"
STILL_ACTIVE = "l.state IS NOT DISTINCT FROM 'active'"
#: A job that waits until it may be tried again; the end of that wait. A cycle makes due jobs ready before it picks.
AT_REST = f"{STATE.of(job='')} AND schedule_after IS NOT NULL"
DUE = "schedule_after <= now()"
#: Until when a paused job is set aside, so that no pick reads it: for ever. A job whose pause is over is made ready.
PAUSED_UNTIL = "timestamptz '9999-01-01 00:00:00+00'"
#: A job that has been set aside because of a pause.
IS_SET_ASIDE = f"{AT_REST} AND schedule_after = {PAUSED_UNTIL}"


def _any_job(condition: str, *, last: str) -> str:
    """Return the expression whether there is such a job. It looks for the last one in this order, of an index of them:
    before the first one are the entries of jobs that have started, which stay for as long as somebody has an old
    snapshot open. `EXISTS` would drop the order."""
    return f"(SELECT true FROM jobs WHERE {condition} ORDER BY {last} LIMIT 1) IS NOT NULL"


#: Some job with constraints is ready; some job without is.
ANY_CONSTRAINED_READY = _any_job(READY_CONSTRAINED, last="queue DESC")
ANY_IN_FRONT = _any_job(IN_FRONT, last="cohort DESC, rank DESC, queued_at DESC, id DESC")


def ready_in(queue: str) -> str:
    """The condition that a job is ready and in `queue`, a row with `id` and `constraint_set`."""
    return f"constrained = ({queue}.constraint_set IS NOT NULL) AND queue = {queue}.id AND {READY}"


def has_ready_jobs(queue: str) -> str:
    """The condition that `queue`, a row with `id` and `constraint_set`, has a ready job."""
    return _any_job(ready_in(queue), last="rank DESC, queued_at DESC, id DESC")


def ready_queues(name: str, *, constrained: bool = False) -> str:
    """A recursive CTE `name` with a column `queue`: the ids of all queues that hold ready jobs without constraints, or
    with constraints, and at last a null.

    A loose index scan: one step for each queue, however many jobs it holds. It goes backwards and so reads the last job
    of each queue. In front of a queue are the index entries of jobs that have just started.
    """
    ready = READY_CONSTRAINED if constrained else READY_PLAIN
    step = f"SELECT queue FROM jobs WHERE {ready}{{}} ORDER BY queue DESC LIMIT 1"
    return f"""{name} AS (
    SELECT ({step.format("")}) AS queue
    UNION ALL
    SELECT ({step.format(" AND queue < w.queue")}) FROM {name} w WHERE w.queue IS NOT NULL
)"""


def assigner_is_placing(assigner: str) -> str:
    """The condition that an assigner process is alive and not drained, whatever cohorts and instances it serves."""
    return _ASSIGNER_IS_PLACING.format(assigner=f"{assigner}.")


def serves(bot: str, want: str) -> str:
    """The condition that `bot` serves the instance of `want`: that instance, its pool, or every instance."""
    return SERVES.of(bot=bot, want=want)


def room_for(bot: str, want: str) -> str:
    """The units that `bot`, a row or the columns of one, has left for the instance of `want`."""
    return _ROOM_FOR.format(bot=f"{bot}." if bot else "", want=f"{want}.")


def can_take(bot: str, want: str) -> str:
    """The condition that `bot` could take `want` now."""
    return " AND ".join(gate.of(bot=bot, want=want) for gate in (COHORT, ROOM, SERVES, REQUIREMENTS))
