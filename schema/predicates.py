"""Gates: every hard condition on a job, each with a name, in one place.

What picks jobs, what chooses bots for them and what grants joins these expressions; what explains evaluates the same
ones for a single job and shows the evidence. A new rule is a new gate here.
"""

from dataclasses import dataclass

from schema.timing import DEAD_AFTER


@dataclass(frozen=True)
class Predicate:
    """One condition: its name, the SQL expression that is true while it is open and, for people, what it asks.

    In the expression `{job}`, `{instance}`, `{reservation}`, `{assigner}`, `{bot}` and `{want}` stand for rows, and
    `{headroom}` for the units that a quota leaves, NULL for any number.
    """

    name: str
    sql: str
    requirement: str

    def of(self, *, headroom: str = "", **rows: str) -> str:
        """The expression on rows with these names; a row with an empty name is the only one there."""
        return self.sql.format(headroom=headroom, **{kind: f"{row}." if row else "" for kind, row in rows.items()})


# On the job, its instance, its quota. Whoever picks need not ask about dependencies: a blocked job is not queued.
DEPENDENCIES = Predicate(
    "dependencies", "{job}state <> 'blocked'", "what it depends on in its graph has ended as it asks"
)
STATE = Predicate("state", "{job}state = 'queued'", "it waits, and is neither held aside nor over")
BACKOFF = Predicate("backoff", "{job}schedule_after IS NULL", "it does not rest after a failure")
RESERVATION = Predicate("reservation", "{reservation}until < clock_timestamp()", "no bot is being freed for it")
DRAIN = Predicate("drain", "NOT {instance}draining", "its instance is not being drained")
QUOTA = Predicate(
    "quota", "({headroom} IS NULL OR {job}units <= {headroom})", "its instance's quota leaves enough units"
)

# On a bot, for a job or a queue of jobs `want`, a row that also has its instance's pool. Each of them is asked of the
# bots that those before it have left. Cohorts are compared in words that match no index: the bot has been found.
COHORT = Predicate("cohort", "{bot}cohort IS NOT DISTINCT FROM {want}cohort", "its cohort has healthy bots")
REQUIREMENTS = Predicate(
    "requirements",
    "bp.platform = {want}platform AND bp.bot_id = {bot}id",
    "a bot of the cohort offers what it requires",
)
SERVES = Predicate(
    "instance",
    "({bot}instance IS NULL AND {bot}pool IS NULL OR {bot}instance = {want}instance OR {bot}pool = {want}pool)",
    "such a bot serves its instance",
)
HEALTHY = Predicate(
    "healthy", "{bot}status = 'ok' AND NOT {bot}draining AND NOT {bot}closing", "such a bot is healthy and takes work"
)
PROBATION = Predicate(
    "probation",
    "({bot}probation_until IS NULL OR {bot}in_use = 0)",
    "such a bot is not on probation, or holds nothing",
)
UNITS = Predicate("units", "{bot}capacity >= {want}units", "such a bot is large enough")
ROOM = Predicate(
    "room", "{bot}free AND {bot}capacity - {bot}in_use - {bot}reserved >= {want}units", "such a bot has room"
)

# On the pool, for a job `want`: a row with its cohort's name, and as `peers` the names of its instance and of those
# that share its pool.
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
#: It only reminds: the job may be placed until upkeep has given it up.
QUEUE_DEADLINE = Predicate("queue deadline", "true", "it may still wait")

#: A ready job, in words that match the indexes of ready jobs: one that asks for nothing but a place.
READY = f"{STATE.of(job='')} AND {BACKOFF.of(job='')} AND constraint_set IS NULL"
#: One that asks for more, in words that match the index of those.
CONSTRAINED = f"{STATE.of(job='')} AND {BACKOFF.of(job='')} AND constraint_set IS NOT NULL"
#: The same in words that match the index of the front and no other; who looks into a queue must not read that one.
IN_LINE = f"{READY} AND units >= 1"
#: Either of them in words that match no index, which leaves the planner nothing but the primary key.
STILL_READY = f"{STATE.of(job='')} AND coalesce(schedule_after, '-infinity') = '-infinity'"
#: A job that rests, one that asks for nothing but a place among them, and one whose rest is over: a cycle makes those
#: ready before it picks.
AT_REST = f"{STATE.of(job='')} AND schedule_after IS NOT NULL"
RESTING = f"{AT_REST} AND constraint_set IS NULL"
DUE = "schedule_after <= now()"


def open_instance(headroom: str) -> str:
    """The condition that an instance of which the quota leaves `headroom` may be given anything at all."""
    return f"coalesce({headroom}, 1) > 0"


def assigner_is_placing(assigner: str) -> str:
    """The condition that a process of assigners is there and places jobs, whichever it serves."""
    return _ASSIGNER_IS_PLACING.format(assigner=f"{assigner}.")


def serves(bot: str, want: str) -> str:
    """The condition that `bot` is for the instance of `want`: for that one, for its pool, or for every instance."""
    return SERVES.of(bot=bot, want=want)


def can_take(bot: str, want: str) -> str:
    """The condition that `bot`, which offers what `want` requires, could take it now."""
    return " AND ".join(gate.of(bot=bot, want=want) for gate in (COHORT, ROOM, SERVES))
