"""Faults of a server that runs: locks, connections, read-only, no space, old snapshots, cancelled statements."""

import threading
from contextlib import suppress

import psycopg
from psycopg import sql

from ops.chaos.faults.fault import Fault
from ops.chaos.faults.kills import backends
from ops.chaos.pool import ChaosPool
from schema import clock

#: Tables that every move of a job needs.
TABLES = ("jobs", "leases", "bots", "stored_events", "submit_keys", "job_payloads", "queues", "quotas", "tokens")
#: Seconds between two rounds of cancelled statements.
AGAIN = 0.03


class TableLock(Fault):
    """Locks a table as `ALTER TABLE` or `VACUUM FULL` does."""

    name = "lock-table"
    holds = (0.3, 2.5)

    def inject(self) -> None:
        self.target = self.chance.choice(TABLES)
        self.connection = self.pool.server.connect()
        self.connection.execute("SET lock_timeout = '10s'")
        self.connection.execute("BEGIN")
        with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            self.connection.execute(
                sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(sql.Identifier(self.target))
            )

    def heal(self) -> None:
        self.connection.close()


class ConnectionsUsedUp(Fault):
    """Takes every connection that the server allows, and ends those of members."""

    name = "use-up-connections"
    holds = (0.5, 2.0)

    def inject(self) -> None:
        self.taken: list[psycopg.Connection[object]] = []
        with self.pool.server.connect() as admin:
            for pid in backends(self):
                admin.execute("SELECT pg_terminate_backend(%s)", [pid])
                self._take()
            while self._take():
                pass

    def heal(self) -> None:
        for connection in self.taken:
            connection.close()

    def _take(self) -> bool:
        try:
            self.taken.append(self.pool.server.connect(application_name="chaos-taken"))
        except psycopg.OperationalError:
            return False
        return True


class ReadOnly(Fault):
    """Makes every transaction read-only, as on a standby that was promoted halfway or a server under maintenance."""

    name = "read-only"
    holds = (0.3, 2.0)

    def inject(self) -> None:
        self._say("ALTER SYSTEM SET default_transaction_read_only = on")

    def heal(self) -> None:
        self._say("ALTER SYSTEM RESET default_transaction_read_only")

    def _say(self, statement: str) -> None:
        with self.pool.server.connect() as connection:
            connection.execute(statement.encode())
            connection.execute("SELECT pg_reload_conf()")


class DiskFull(Fault):
    """Leaves the server no free space. Tables cannot grow, or PostgreSQL stops because it cannot write its log."""

    name = "fill-disk"
    holds = (0.5, 2.0)

    @classmethod
    def missing(cls, _pool: ChaosPool) -> str | None:
        return None if _pool.server.has_disk else "only root can give the data a file system of their own"

    def inject(self) -> None:
        self.target = self.chance.choice(("tables", "log"))
        with self.pool.server.connect() as connection:
            self.pool.server.fill_disk()
            if self.target == "log":
                with suppress(psycopg.OperationalError):
                    connection.execute("SELECT pg_switch_wal()")

    def heal(self) -> None:
        self.pool.server.free_disk()
        self.pool.server.ensure()


class HeldSnapshot(Fault):
    """Holds a snapshot, as a backup or a forgotten session does, so that nothing old can be removed."""

    name = "hold-snapshot"
    holds = (1.0, 3.0)

    def inject(self) -> None:
        self.connection = self.pool.server.connect()
        self.connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        self.connection.execute("SELECT count(*) FROM jobs")

    def heal(self) -> None:
        self.connection.close()


class StatementTimeouts(Fault):
    """Cancels every statement that runs, again and again, as a statement time-out does."""

    name = "time-out-statements"
    holds = (0.3, 1.5)

    def inject(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._cancel, name="cancel", daemon=True)
        self._thread.start()

    def heal(self) -> None:
        self._over.set()
        self._thread.join()

    def _cancel(self) -> None:
        with suppress(psycopg.OperationalError), self.pool.server.connect(application_name="chaos") as connection:
            while not clock.wait(self._over, AGAIN):
                connection.execute(
                    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE state = 'active'"
                    " AND datname = current_database() AND application_name NOT LIKE 'chaos%'"
                    " AND backend_type = 'client backend' AND application_name <> ''"
                )


class CheckpointAndVacuum(Fault):
    """Makes the server write everything and rewrite a table in full, which takes its lock and moves its rows."""

    name = "vacuum-full"

    def inject(self) -> None:
        self.target = self.chance.choice(("jobs", "leases", "bots"))
        with self.pool.server.connect() as connection:
            connection.execute("SET lock_timeout = '10s'")
            with suppress(psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
                connection.execute(sql.SQL("VACUUM FULL {}").format(sql.Identifier(self.target)))
            connection.execute("CHECKPOINT")


DATABASE = (
    TableLock,
    ConnectionsUsedUp,
    ReadOnly,
    DiskFull,
    HeldSnapshot,
    StatementTimeouts,
    CheckpointAndVacuum,
)
