"""Races by construction: one transaction stays open while another one runs into it.

No test of a race depends on time. The server tells whether a transaction waits, and the test decides when the first one
ends.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from leasehold.states import JobState

from bots.protocol import Sync
from bots.sync.call import HeldCall
from schema.moves import cancel as cancel_moves
from schema.moves import sessions
from schema.moves.cancel import Cancelled
from schema.moves.end import EndedAttempt
from schema.moves.retention import delete_finished
from schema.moves.waiting import hold, priority
from schema.moves.waiting.hold import HoldResult
from schema.moves.waiting.priority import ManyPrioritised, Prioritised
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from tests.support import plans
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Bot, Pool, synced

T = TypeVar("T")

BLOCKED = Statement("""
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND CAST(:holder AS integer) = ANY (pg_blocking_pids(pid))
""")
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
#: Makes the server detect a deadlock after 50 ms.
DEADLOCK_TIMEOUT = """
DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''50ms''', current_database()); END $$"""
BACKENDS = """
SELECT count(*) AS others FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
    AND application_name NOT LIKE 'checks%'"""
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
PID = Statement("SELECT pg_backend_pid()")


class _OneTransaction:
    """Replaces a Database: it runs all work in one transaction, which the test ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run(
        self,
        work: Callable[[Connection], T],
        *,
        urgent: bool = False,
        undone: Callable[[], None] | None = None,
        kept_plans: bool = False,
        repeat: bool = True,
    ) -> T:
        del urgent, undone, kept_plans, repeat
        done = work(self._connection)
        self._connection.execute(PID)  # and what was to be sent with the commit
        return done

    def waiting_once(self) -> "_OneTransaction":
        return self


class Undecided(Pool):
    """A pool whose work all runs in one open transaction."""

    def __init__(self, pool: Pool, connection: Connection) -> None:
        super().__init__(cast(Database, _OneTransaction(connection)), pool.timing, pool.chance)
        self.connection = connection
        self.pid: int = connection.execute(PID).scalar_one()

    def commit(self) -> None:
        """Commit the transaction; the contender that waits for it goes on."""
        self.connection.commit()

    def roll_back(self) -> None:
        """Roll the transaction back; the contender that waits for it goes on."""
        self.connection.rollback()

    def decide(self, commit: bool) -> None:
        """Commit or roll back."""
        if commit:
            self.commit()
        else:
            self.roll_back()


class Race:
    """Transactions that contend on the database of one pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._threads = ThreadPoolExecutor(max_workers=4)
        self._watch = ExitStack()
        self._failed = self._watch.enter_context(plans.errors())

    @property
    def errors(self) -> list[str | None]:
        """SQLSTATEs of all errors so far, including those after which a transaction was repeated."""
        return [error.sqlstate for error in self._failed]

    def forget_errors(self) -> None:
        """Forget the errors so far, which were expected."""
        self._failed.clear()

    @contextmanager
    def first(
        self, *, isolation: Literal["READ COMMITTED", "REPEATABLE READ"] = "READ COMMITTED"
    ) -> Iterator[Undecided]:
        """Open the first transaction. It is rolled back at the end of the block if it is still open."""
        with self.pool.database.connect() as connection:
            connection.execute_sql(f"SET TRANSACTION ISOLATION LEVEL {isolation}")
            yield Undecided(self.pool, connection)

    def second(self, work: Callable[[], T], *, behind: Undecided) -> "Future[T]":
        """Start `work` in a thread, and return when it waits for the transaction of `behind`; fail if it never does."""
        future = self._threads.submit(work)

        def waits() -> bool:
            assert not future.done(), f"nobody waited, it went through: {future}"
            return self._blocked_by(behind.pid) > 0

        eventually(waits, what="the second contender waits for the first")
        assert not future.done()
        return future

    def as_far_as_it_goes(self, work: Callable[[], T], *, behind: int) -> "Future[T]":
        """Start `work` in a thread, and return when it has ended, or when more than `behind` transactions wait."""
        future = self._threads.submit(work)
        eventually(lambda: future.done() or self.pool.row(WAITING)[0] > behind)
        return future

    def unhindered(self, work: Callable[[], T], *, by: Undecided) -> T:
        """Run `work` in a thread while the transaction of `by` is open; fail if it waits for it. Returns its result."""
        future = self._threads.submit(work)

        def through() -> bool:
            if future.done():
                return True
            if self._blocked_by(by.pid):
                by.roll_back()
                raise RuntimeError("it waits, although it should skip what is locked")
            return False

        eventually(through, what="it gets through")
        return future.result()

    def in_turn(self, first: Callable[[Undecided], object], second: Callable[[], T], *, commit: bool = True) -> T:
        """Make `second` wait for the transaction of `first`, end that one, and return the result of `second`."""
        with self.first() as ahead:
            first(ahead)
            late = self.second(second, behind=ahead)
            ahead.decide(commit)
            return outcome(late)

    def side_by_side(self, first: Callable[[Undecided], object], second: Callable[[], T], *, commit: bool = True) -> T:
        """Run `second` while the transaction of `first` is open, then end that one; fail if `second` waits for it."""
        with self.first() as ahead:
            first(ahead)
            found = self.unhindered(second, by=ahead)
            ahead.decide(commit)
            return found

    def close(self) -> None:
        """Join the threads."""
        self._threads.shutdown()
        self._watch.close()

    def _blocked_by(self, pid: int) -> int:
        count: int = self.pool.row(BLOCKED.text, holder=pid)[0]
        return count


def outcome(future: "Future[T]") -> T:
    """The result of the second contender; raises its error."""
    return future.result(timeout=MINUTE)


def at_service_of(pool: Pool, bot: Bot) -> Bot:
    """The same bot as a caller of another pool's sync service, usually that of an open transaction."""
    return replace(bot, sync_service=pool.sync_service())


def call(bot: Bot, message: Sync) -> bytes:
    """Send one prepared message, and return the encoded answer."""
    answer = synced(bot.sync_service, message)
    assert not isinstance(answer, HeldCall), "the call was held back"
    return answer


def expire(pool: Pool) -> list[EndedAttempt]:
    """Expire overdue sessions without the grace that upkeep gives. Returns the ended attempts."""
    return pool.database.run(lambda c: sessions.expire(c, after=0, limit=500, actor="reaper"))[1]


def cancel(pool: Pool, *jobs: str) -> list[Cancelled]:
    """Cancel jobs as an operator."""
    return pool.database.run(lambda c: cancel_moves.cancel(c, jobs, instances=None, sync=1.0, actor="test"))


def ask_stop(pool: Pool, *, from_state: str = "pending", reason: str = "unacknowledged") -> int:
    """Ask to stop every lease in this state, as upkeep does with overdue ones."""
    leases = pool.rows("SELECT job_id, fence FROM live WHERE state = :state ORDER BY job_id", state=from_state)
    wanted = [(lease.job_id, lease.fence) for lease in leases]
    return pool.database.run(lambda c: cancel_moves.ask_stop(c, wanted, from_state=from_state, reason=reason, sync=1.0))


def drain(pool: Pool, *, draining: bool = True, bot: str = "bot-1") -> None:
    """Drain a bot, or end its drain."""
    pool.database.run(lambda c: sessions.drain(c, bot, draining=draining, actor="test", reason="test"))


def retention(pool: Pool) -> int:
    """Delete every finished job."""
    final = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DEAD)
    return pool.database.run(lambda c: sum(delete_finished(c, state, age=0.0, limit=500).rows for state in final))


def offered(pool: Pool, **fields: Any) -> tuple[str, Bot, dict[str, Any]]:
    """Make a job whose lease is delivered to a bot and not acknowledged."""
    (job,) = pool.submit(**fields)
    bot = pool.bot()
    pool.assigner().run_once()
    (work,) = bot.sync()["leases"]
    return job, bot, work


def counted_state(pool: Pool, job: str) -> dict[str, Any]:
    """State of one job, its leases and the bots, as the tables have it."""
    row = pool.job(job)
    leases = pool.rows("SELECT fence, state FROM leases WHERE job_id = :id ORDER BY fence", id=row.id)
    return {
        "job": (row.state, row.fence, row.result_fence),
        "attempts": (row.attempts, row.kills),
        "leases": [(lease.fence, lease.state) for lease in leases],
        "in_use": [bot.in_use for bot in pool.rows("SELECT in_use FROM bots ORDER BY name")],
        "last": pool.history(job)[-1],
    }


FINISHED = {
    "job": ("succeeded", 1, 1),
    "attempts": (1, 0),
    "leases": [(1, "completed")],
    "in_use": [0],
    "last": "finish",
}
LOST = {"job": ("queued", 2, None), "attempts": (1, 1), "leases": [(1, "cancelled")], "in_use": [0], "last": "expire"}


def park(pool: Pool, *jobs: str, reason: str | None = None) -> list[HoldResult]:
    """Park jobs as an operator."""
    return pool.database.run(lambda c: hold.park(c, jobs, instances=None, reason=reason, actor="test"))


def unpark(pool: Pool, *jobs: str) -> list[HoldResult]:
    """Release parked jobs as an operator."""
    return pool.database.run(lambda c: hold.unpark(c, jobs, instances=None, reason=None, actor="test"))


def prioritise(pool: Pool, value: int, *jobs: str) -> list[Prioritised]:
    """Give jobs another priority as an operator."""
    return pool.database.run(
        lambda c: priority.set_priority(c, jobs, value, instances=None, reason="test", actor="test")
    )


def prioritise_where(
    pool: Pool, value: int, *, instances: list[str] | None = None, label: str | None = None, limit: int = 10
) -> ManyPrioritised:
    """Give all jobs of instances and a label another priority as an operator."""
    who = {"reason": None, "actor": "test"}
    return pool.database.run(
        lambda c: priority.set_priority_where(c, value, instances=instances, label=label, limit=limit, **who)
    )
