"""Reads from a standby: a real copy of the server that replays what the first one does, and what makes it unfit."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from leasehold.pool import Pool

from schema.postgres import embedded, migrate
from schema.postgres.embedded import Cluster
from schema.postgres.engine import Database
from schema.postgres.standby import StandbyReads
from schema.postgres.statements import Statement
from schema.timing import Timing
from tests.support.patience import eventually
from tests.support.screens.console import Clock
from tests.support.servers import opened, serving

#: What is read there; none of these writes anything.
READ = (
    *(
        "jobs",
        "status",
        "bots",
        "usage",
        "report",
        "preemptions",
        "class-report",
        "samples",
        "samples/fairness",
        "graphs",
    ),
    *("audit", "decisions", "metadata/summary?metadata=a%3Db", "metadata?key=a", "builds", "simulations"),
)
POSITION = "SELECT pg_current_wal_lsn() - CAST('0/0' AS pg_lsn)"
IN_RECOVERY = Statement("SELECT pg_is_in_recovery()")


@pytest.fixture
def pair(scratch: Path) -> Iterator[tuple[Database, Database]]:
    """A server with the schema, and a standby that follows it."""
    with ExitStack() as stack:
        server = stack.enter_context(embedded.serve(scratch / "first", durable=False))
        stack.callback((primary := opened(server.url)).close)
        migrate.upgrade(primary)
        source = Cluster.find(scratch / "first")
        (target := scratch / "second").mkdir(mode=0o711)
        source.account.own(target)
        where = ["-h", str(source.directory), "-p", str(embedded.PORT), "-U", embedded.NAME]
        subprocess.run(
            [source.programs / "pg_basebackup", *where, "-R", "-c", "fast", "--no-sync", "-D", str(target / "pg")],
            check=True, capture_output=True, **source.account.arguments(),
        )  # fmt: skip
        copy = stack.enter_context(embedded.serve(target, durable=False))
        stack.callback((standby := opened(copy.url)).close)
        yield primary, standby


def asked(database: Database, statement: str) -> Any:
    return database.run(lambda connection: connection.execute(Statement(statement)).scalar_one())


def where(reads: StandbyReads) -> str:
    return "standby" if reads.run(lambda connection: connection.execute(IN_RECOVERY).scalar_one()) else "primary"


def looked(reads: StandbyReads, words: str) -> Callable[[], bool]:
    def look() -> bool:
        reads.run_once()
        return words == reads.trouble

    return look


def test_reads_go_to_a_standby_while_it_keeps_up_and_otherwise_to_the_primary(
    pair: tuple[Database, Database], timing: Timing
) -> None:
    primary, standby = pair
    clock = Clock()
    reads = StandbyReads(primary, standby, max_lag=10, monotonic=clock)
    assert where(reads) == "primary", "nobody has looked yet"
    eventually(looked(reads, ""))
    assert where(reads) == "standby"
    with serving(primary, timing, standby=reads) as served:
        token = served.token("operator")
        reads.run_once()
        with served.client(token) as http, Pool(served.url, token) as pool:
            for path in READ:
                assert http.get(f"/v1/{path}").status_code == 200, path
                assert not reads.trouble, f"{path} writes: {reads.trouble}"
            asked(standby, "SELECT pg_wal_replay_pause()")
            eventually(lambda: asked(standby, "SELECT pg_get_wal_replay_pause_state()") == "paused")
            before = asked(primary, POSITION)
            pool.submit(["true"], label="late")
            eventually(lambda: asked(primary, POSITION) > before)
            for _ in range(2):
                reads.run_once()
                clock.at += 5.0
            reads.run_once()
            assert (reads.trouble, reads.lag, where(reads)) == ("", 10.0, "standby")
            assert pool.client.status()["reads"] == {"standby": True, "lag_seconds": 10.0, "reason": None}
            assert list(pool.jobs()) == [], "an answer of before"
            assert [job["label"] for job in pool.client.list(primary="true").jobs] == ["late"], "who waits for jobs"
            clock.at += 1.0
            reads.run_once()
            assert (reads.trouble, where(reads)) == ("the standby is 11 s behind, more than 10 s", "primary")
            assert [job.label for job in pool.jobs()] == ["late"]
        asked(standby, "SELECT pg_wal_replay_resume()")
        eventually(looked(reads, ""))
        clock.at += 10.5
        assert (where(reads), reads.lag) == ("primary", None), "nobody has looked for as long as it may be behind"
        eventually(looked(reads, ""))
        asked(standby, "SELECT pg_promote()")
        eventually(looked(reads, "the server at read_url is no standby: it takes writes"))
        assert where(reads) == "primary"


def test_a_standby_that_is_away_or_of_another_server_is_not_read(
    database: Database,
) -> None:
    away = opened("postgresql://127.0.0.1:9/none")
    reads = StandbyReads(database, away, max_lag=10)
    reads.run_once()
    assert (reads.trouble, reads.lag, where(reads)) == ("the standby: the database cannot be reached", None, "primary")
    reads._trouble = ""
    assert (where(reads), reads.trouble) == ("primary", "the standby: the database cannot be reached")
    away.close()
