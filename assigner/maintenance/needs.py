"""Whether the duties of each round have anything to do, asked for all of them at once.

Most of the time they have nothing, and each would find so in a transaction of its own. A round begins every other
second, in each assigner process. A duty is left out only if the answer says so: without an answer, each of them runs.
"""

from schema.clock import Monotonic
from schema.fleet.kinds import UNLINKED
from schema.fleet.success import ANY_REVIEW
from schema.moves.dependencies import ANY_OPEN_GRAPH
from schema.moves.preempt import UNUSED
from schema.moves.waiting.priority import REPRICING, WATCHED
from schema.moves.waiting.timeouts import ANY_CEILING, ANY_DRAINED, LATE
from schema.policy.queue_limits import ANY_OVERFLOW
from schema.postgres.engine import Database
from schema.postgres.statements import Row, Statement
from schema.sql import LIVE

#: Seconds between two rounds in which all duties run, whatever is found.
THOROUGH_INTERVAL = 60.0

#: The condition of a lease that is overdue since less than `:since` seconds, unless its bot is being closed for it. The
#: lower bound matters while an old snapshot is open: then the index keeps every lease that ended since, and most of
#: these were due by now.
OVERDUE = f"""{LIVE} AND due_at < now() AND due_at >= now() - make_interval(secs => :since)
    AND NOT (state = 'cancelling' AND EXISTS (SELECT FROM bots b WHERE b.id = leases.bot_id AND b.closing))"""


def _any(table: str, condition: str, *, order: str) -> str:
    """Return the SQL expression whether there is such a row. order: of the index that has such rows alone.

    `EXISTS` drops an order. Where the planner expects many such rows and there is none, it would read the whole table.
    """
    return f"(SELECT true FROM {table} WHERE {condition} ORDER BY {order} LIMIT 1) IS NOT NULL"


#: What duties look for, by a word for it: true whenever the statement of a duty would find anything.
NEEDS = {
    "overdue": _any("leases", OVERDUE, order="due_at"),
    "drained": ANY_DRAINED,
    "ceilings": ANY_CEILING,
    "kept": _any("bots", UNUSED, order="kept_for"),
    "probation": ANY_REVIEW,
    "late": _any("jobs", LATE, order="queue_deadline"),
    "unlinked": _any("platforms", UNLINKED, order="id"),
    "graphs": f"coalesce({ANY_OPEN_GRAPH}, false)",
    "repricing": f"EXISTS (SELECT FROM policy_in_force WHERE {REPRICING})",
    "watched": _any("job_constraints", WATCHED, order="watch_at"),
    "overflow": ANY_OVERFLOW,
}
NEEDED = Statement("SELECT " + ", ".join(f"{condition} AS {name}" for name, condition in NEEDS.items()))


class Needs:
    """What the present round has found to do. since: seconds within which a lease that is overdue became so."""

    def __init__(self, database: Database, now: Monotonic, *, since: float) -> None:
        self._database, self._now, self._since = database, now, since
        #: What was found last, None = nobody knows; and whether a duty has run since.
        self._found: Row | None = None
        self._is_stale = False
        self._is_thorough, self._thorough_at = False, now() + THOROUGH_INTERVAL

    def begin(self) -> None:
        """Begin a round. Once a minute it is a thorough one, in which nothing is asked."""
        now = self._now()
        self._found, self._is_thorough = None, now >= self._thorough_at
        if self._is_thorough:
            self._thorough_at = now + THOROUGH_INTERVAL

    def ask(self) -> None:
        """Ask what there is to do. If that fails, everything counts as needed for the rest of the round."""
        self._found, self._is_stale = None, False
        if not self._is_thorough:
            values = {"since": self._since}
            self._found = self._database.run(
                lambda connection: connection.execute(NEEDED, values).one(), urgent=True, kept_plans=True
            )

    def is_outdated(self, what: str) -> bool:
        """Return whether there was nothing to do of this, and a duty that has run since may have made some."""
        return self._found is not None and self._is_stale and not getattr(self._found, what)

    def are_there(self, what: str) -> bool:
        """Return whether there may be anything to do of this, also if nobody knows. If so, the caller does it."""
        is_there = self._found is None or bool(getattr(self._found, what))
        self._is_stale |= is_there
        return is_there
