"""A standby is promoted that lacks the last commits: real data directories, a real backup and a real promotion."""

import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from leasehold.errors import Conflict, NotReady

from schema.diagnostics import invariants
from schema.postgres import embedded, engine, migrate
from schema.postgres.embedded import Cluster
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from schema.tenancy import tokens
from schema.timing import Timing
from tests.support.pool import Bot, Pool, active, completed, only
from tests.support.servers import opened, serving


@dataclass
class Pair:
    """A pool on the first server, and on a standby with what had been committed when `copy` was called."""

    scratch: Path
    timing: Timing
    chance: random.Random
    stack: ExitStack

    def first(self) -> Pool:
        server = self.stack.enter_context(embedded.serve(self.scratch / "first", durable=False))
        return self._pool(opened(server.url))

    def copy(self) -> Pool:
        source = Cluster.find(self.scratch / "first")
        target = self.scratch / "second"
        target.mkdir(mode=0o711)
        source.account.own(target)
        where = ["-h", str(source.directory), "-p", str(embedded.PORT), "-U", embedded.NAME]
        options = ["-X", "stream", "-c", "fast", "--no-sync", "-D", str(target / "pg")]
        made = subprocess.run(
            [source.programs / "pg_basebackup", *where, *options],
            capture_output=True, text=True, check=False, **source.account.arguments(),
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        (target / "pg" / "standby.signal").touch()
        server = self.stack.enter_context(embedded.serve(target, durable=False))
        settings = DatabaseSettings(outage_seconds=0.3)
        return self._pool(Database(server.url, settings, role="test", chance=random.Random(0)))

    def _pool(self, database: Database) -> Pool:
        self.stack.callback(database.close)
        return Pool(database, self.timing, self.chance)


@pytest.fixture
def pair(scratch: Path, timing: Timing, chance: random.Random) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(scratch, timing, chance, stack)


def promote(pool: Pool) -> None:
    assert pool.row("SELECT pg_promote() AS done").done


def after_failover(pool: Pool, bot: Bot) -> Bot:
    """The same bot, which now calls the other server."""
    return Bot(pool.sync_service(), bot.session, bot.seq)


def backend(pool: Pool) -> int:
    return int(pool.row("SELECT pg_backend_pid() AS pid").pid)


@pytest.mark.long
def test_a_server_that_takes_no_writes_is_an_outage_and_once_promoted_it_repeats_no_fence(pair: Pair) -> None:
    before = pair.first()
    migrate.upgrade(before.database)
    ended, running = before.submit(2)
    early, late = before.bot("early"), before.bot("late")
    token = before.database.run(lambda connection: tokens.create(connection, "operator"))
    submitter = before.database.run(lambda connection: tokens.create(connection, "submitter"))
    with only(before, early):
        [kept] = before.given(early)
    after = pair.copy()
    # What follows is lost: the second session of a bot, an attempt of one job, and the end of the other job.
    late = before.bot("late")
    [lost] = before.given(late)
    early.sync(completed(kept))
    assert [(kept["job"], kept["fence"]), (lost["job"], lost["fence"])] == [(ended, 1), (running, 1)]

    first = backend(after)
    with pytest.raises(NotReady, match="the database is read-only"):
        after.database.run(lambda connection: connection.execute(Statement("DELETE FROM jobs")))
    second = backend(after)
    with pytest.raises(NotReady, match="the database is read-only"):
        after.database.run_alone(lambda driver: engine.single_row(driver, b"SELECT nextval('leasehold.jobs_id_seq')"))
    assert len({first, second, backend(after)}) == 3, "other connections may lead to the primary"
    with serving(after.database, after.timing, wakeups=False) as served, served.client(token) as http:
        job = {"command": ["true"]}
        refused = [http.get("/readyz"), http.post("/v1/jobs", json={"jobs": [job]})]
        with served.client(submitter) as keyed:  # one statement, which commits in the same round trip
            refused.append(keyed.post("/v1/jobs", json={"jobs": [job | {"key": "k"}]}))
        promote(after)
        assert http.get("/readyz").status_code == 200
    for answer in refused:
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
        assert answer.json()["detail"] == "the database is read-only"

    # The bot is not told that another agent has taken over its name. It opens another session.
    with pytest.raises(Conflict) as over:
        after_failover(after, late).sync(active(lost))
    assert over.value.code == "session_over"
    [again] = after.given(after.bot("late"))
    assert (again["job"], again["fence"]) == (running, 2**32 + 1)
    # The bot that has ended its job does not know the lease any more, so that the job is granted with a new fence.
    early = after_failover(after, early)
    assert early.sync()["leases"] == []
    [retried] = after.given(early)
    assert (retried["job"], retried["fence"]) == (ended, 2**32 + 1)
    early.sync(completed(retried))
    assert (after.job(ended).state, after.job(ended).result_fence) == ("succeeded", 2**32 + 1)
    assert not [finding for finding in invariants.verify(after.database) if finding.rows]
