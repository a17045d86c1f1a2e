"""A dump is restored into another server: nothing starts until fences continue above all that were granted."""

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from leasehold.errors import NotReady

from schema.diagnostics import doctor, invariants
from schema.postgres import embedded, migrate
from schema.postgres.embedded import Cluster
from schema.postgres.engine import Database, libpq_url
from schema.postgres.statements import Statement
from schema.tenancy import restored
from schema.timing import Timing
from tests.support.patience import eventually
from tests.support.pool import Bot, Pool, active, completed
from tests.support.servers import Console, opened, serving

MOVED = migrate.MOVED


@dataclass
class Servers:
    """Private servers, and what PostgreSQL's programs do with them."""

    scratch: Path
    timing: Timing
    chance: random.Random
    stack: ExitStack

    def make(self, name: str) -> str:
        """Start a server in the directory `name`, and return the URL of its database."""
        return self.stack.enter_context(embedded.serve(self.scratch / name, durable=False)).url

    def pool(self, url: str) -> Pool:
        """A pool on the database, as it is."""
        self.stack.callback((database := opened(url)).close)
        return Pool(database, self.timing, self.chance)

    def programs(self, program: str, *arguments: str) -> None:
        """Run a program of PostgreSQL to its end."""
        source = Cluster.find(self.scratch / "old")
        done = subprocess.run(
            [source.programs / program, *arguments],
            capture_output=True, text=True, check=False, **source.account.arguments(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def dump(self, url: str) -> Path:
        """Dump the database as the runbook does."""
        Cluster.find(self.scratch / "old").account.own(self.scratch)
        self.programs("pg_dump", "-Fc", "-d", libpq_url(url), "-f", str(self.scratch / "dump"))
        return self.scratch / "dump"

    def restore(self, dump: Path, url: str) -> None:
        """Restore a dump into an empty database as the runbook does."""
        self.programs("pg_restore", "--exit-on-error", "--single-transaction", "-d", libpq_url(url), str(dump))


@pytest.fixture
def servers(scratch: Path, timing: Timing, chance: random.Random) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(scratch, timing, chance, stack)


def continued(pool: Pool) -> restored.Continued:
    return pool.database.run(lambda connection: restored.continue_fences(connection, actor="test"))


def granted(pool: Pool, bot: Bot) -> dict[str, Any]:
    """The only lease that the bot is given."""
    pool.assigner().run_once()
    (work,) = bot.take()
    return work


def test_nothing_starts_on_a_restored_dump_until_its_fences_are_above_all_that_were_granted(
    servers: Servers, tmp_path: Path, leasehold: Path
) -> None:
    old_url, new_url = servers.make("old"), servers.make("new")
    old = servers.pool(old_url)
    migrate.upgrade(old.database)
    job, bot, lease = old.running()
    dump = servers.dump(old_url)
    # The old server goes on: the job is granted many times more.
    fences = [lease["fence"]]
    for _ in range(3):
        bot.sync(completed({"job": job, "fence": fences[-1]}, "released"))
        fences.append(granted(old, bot)["fence"])
    assert fences[-1] > lease["fence"]

    servers.restore(dump, new_url)
    console = Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=new_url)
    for command in (["assign"], ["gateway"], ["db", "verify"]):
        assert console.refused(*command, code=3) == MOVED
    status = console.run("db", "status", "--json")
    assert (status.returncode, status.stderr) == (3, f"error: {MOVED}\n")
    assert (json.loads(status.stdout)["moved"], json.loads(status.stdout)["ready"]) == (True, False)
    new = servers.pool(new_url)
    assert migrate.upgrade(new.database).moved, "another upgrade does not hide it"
    found = {check.name: check for check in doctor.run_checks(new.database)}["schema"]
    assert (found.verdict, found.remedy) == ("bad", "leasehold db restored")
    with serving(new.database, new.timing, wakeups=False) as served, served.client(served.token("operator")) as http:
        assert (http.get("/readyz").status_code, http.get("/readyz").json()["detail"]) == (503, MOVED)
        told = console.good("db", "restored")
        assert "\nthe database has come to this server; fences of new grants begin at " in told
        assert http.get("/readyz").status_code == 200
    migrate.require(new.database)

    # Its bot still runs the job by the last grant of the old server, which is no lease here: it is to stop that. That
    # of the dump is over, for the bot does not report it.
    same = Bot(new.sync_service(), bot.session, bot.seq)
    assert same.sync(active({"job": job, "fence": fences[-1]}))["leases"] == []
    again = granted(new, same)
    first = int(told.rpartition(" ")[2])
    assert (again["job"], again["fence"]) == (job, first)
    assert 2**32 < first < 2**53
    assert first > max(fences)
    assert [row.action for row in new.rows("SELECT action FROM audit WHERE action = 'db.restored'")] == ["db.restored"]
    assert not [each for each in invariants.verify(new.database) if each.rows]


@pytest.mark.long
def test_servers_into_which_one_dump_is_restored_repeat_no_fence_of_each_other(servers: Servers) -> None:
    url = servers.make("old")
    old = servers.pool(url)
    migrate.upgrade(old.database)
    old.submit()
    dump = servers.dump(url)
    firsts = []
    for name in ("first", "second"):
        pool = servers.pool(servers.make(name))
        servers.restore(dump, pool.database.url)
        done = continued(pool)
        assert done.moved
        assert granted(pool, pool.bot("b"))["fence"] == done.first_fence
        firsts.append(done.first_fence)
    assert firsts[0] + 1 < firsts[1]


def test_a_dump_that_is_restored_into_the_server_it_came_from_is_noticed(servers: Servers) -> None:
    url = servers.make("old")
    old = servers.pool(url)
    migrate.upgrade(old.database)
    dump = servers.dump(url)
    old.change("DROP SCHEMA leasehold CASCADE")
    servers.restore(dump, url)
    with pytest.raises(NotReady, match=MOVED):
        migrate.require(old.database)
    assert continued(old).moved
    migrate.require(old.database)


def test_a_copy_of_a_server_or_a_database_is_no_restored_dump(servers: Servers) -> None:
    source_url = servers.make("old")
    source = servers.pool(source_url)
    migrate.upgrade(source.database)
    done = continued(source)
    source.database.close()
    admin = servers.pool(source_url.replace("/leasehold?", "/postgres?"))
    with admin.database.listen() as connection:
        connection.execute('CREATE DATABASE copied TEMPLATE "leasehold"')
    copied = servers.pool(source_url.replace("/leasehold?", "/copied?"))
    migrate.require(copied.database)
    cluster = Cluster.find(servers.scratch / "old")
    (target := servers.scratch / "standby").mkdir(mode=0o711)
    cluster.account.own(target)
    where = ("-h", str(cluster.directory), "-p", str(embedded.PORT), "-U", embedded.NAME)
    servers.programs("pg_basebackup", *where, "-X", "stream", "-c", "fast", "--no-sync", "-D", str(target / "pg"))
    (target / "pg" / "standby.signal").touch()
    standby = servers.pool(servers.make("standby"))
    migrate.require(standby.database)
    assert standby.row("SELECT pg_promote() AS done").done
    eventually(lambda: not standby.row("SELECT pg_is_in_recovery() AS still").still)
    migrate.require(standby.database)
    # Also after a restore each failover raises the fences.
    standby.submit()
    assert granted(standby, standby.bot("b"))["fence"] == done.first_fence + 2**32


def test_where_nothing_was_restored_fences_only_rise(pool: Pool) -> None:
    job, bot, work = pool.running()
    first, second = continued(pool), continued(pool)
    assert (first.moved, second.moved) == (False, False)
    assert work["fence"] < first.first_fence < second.first_fence
    bot.sync(completed(work, "released"))
    assert granted(pool, bot)["fence"] == second.first_fence
    assert pool.job(job).fence == second.first_fence


def test_a_server_whose_clock_is_behind_raises_no_fence(pool: Pool) -> None:
    pool.change("UPDATE server_identity SET at = now() + interval '1 hour', table_oid = 0")
    before = pool.row("SELECT * FROM server_identity")
    with pytest.raises(NotReady, match=r"the clock of the server says .*, but fences were set at .*; set the clock"):
        continued(pool)
    assert pool.row("SELECT * FROM server_identity") == before


def test_a_database_that_has_lost_the_row_of_its_server_is_not_started_either(pool: Pool) -> None:
    pool.change("DELETE FROM server_identity")
    with pytest.raises(NotReady, match=MOVED):
        migrate.require(pool.database)
    assert continued(pool).moved
    migrate.require(pool.database)


def test_a_database_of_another_version_is_upgraded_first(database: Database) -> None:
    database.run(lambda c: c.execute(Statement("UPDATE alembic_version SET version_num = '0085'")))
    with pytest.raises(NotReady, match="run: leasehold db upgrade"):
        database.run(lambda c: restored.continue_fences(c, actor="test"))
