"""The gateway, single backends and PostgreSQL itself are killed in the middle of things: what was begun goes on."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from leasehold.client import Client

from schema.diagnostics import invariants
from schema.postgres import embedded, migrate
from schema.postgres.engine import Database, DatabaseSettings
from schema.timing import Timing
from tests.support.model import Journal, standing_pool
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool, active
from tests.support.servers import Databases, Processes

WAITING = """
SELECT pid FROM pg_stat_activity
WHERE application_name LIKE 'leasehold-gateway%' AND :holder = ANY (pg_blocking_pids(pid))"""
OURS = "application_name LIKE 'leasehold-%' AND datname = current_database()"


#: Sessions that outlive a restart of the database.
PATIENT = Timing(sync=0.5, ttl=120, reap=0.2, ack=60, poll=0.1)


@dataclass(frozen=True)
class House:
    """A pool of real processes, and the jobs that its tests have submitted."""

    pool: Pool
    processes: Processes
    journal: Journal


@pytest.fixture(scope="module")
def house(databases: Databases, template: str) -> Iterator[House]:
    """A gateway, an assigner and a bot, the invariants watched."""
    with standing_pool(databases, template, PATIENT) as (pool, processes):
        processes.bot("bot-1")
        yield House(pool, processes, Journal(pool))


def slow_job(pool: Pool, journal: Journal, gate: Path) -> str:
    """A job that runs until the file `gate` is there."""
    script = f"while [ ! -e {gate} ]; do sleep 0.05; done; echo through"
    (job,) = journal.submit(1, payload={"command": ["sh", "-c", script]})
    eventually(lambda: pool.job(job).state == "running", what="it runs")
    return job


def kept(pool: Pool, job: str) -> bool:
    """Whether it finished in its first attempt, under its first fence."""
    row = pool.job(job)
    return (row.state, row.attempts, row.fence, row.result_fence) == ("succeeded", 1, 1, 1)


def test_a_gateway_killed_within_a_sync_and_a_submit_costs_no_work(house: House, chance: random.Random) -> None:
    pool, processes, journal = house.pool, house.processes, house.journal
    gate, port = processes.directory / "gate", urlsplit(processes.url).port or 0
    job = slow_job(pool, journal, gate)
    (gateway,) = [process for process in processes.running if process.log.stem == "gateway"]
    answers: list[str] = []

    def submit() -> None:
        with Client(processes.url, processes.operator_token, chance=chance) as client:
            answers.extend(job.id for job in client.submit([{"command": ["true"], "key": "once"}]))

    client_thread = threading.Thread(target=submit)
    with pool.database.connect() as holder:
        pid = holder.execute_sql("SELECT pg_backend_pid()").scalar_one()
        holder.execute_sql("SELECT 1 FROM bots FOR UPDATE")
        eventually(lambda: pool.rows(WAITING, holder=pid), what="a sync waits in the gateway")
        holder.execute_sql("LOCK TABLE submit_keys IN EXCLUSIVE MODE")
        client_thread.start()
        eventually(lambda: len(pool.rows(WAITING, holder=pid)) == 2, what="the submit waits in the gateway too")
        gateway.kill()
        holder.rollback()
    processes.gateway("gateway-again", port=port)
    gate.touch()
    client_thread.join(MINUTE)
    (journal.jobs["once"],) = answers
    journal.wait()
    journal.check()
    assert kept(pool, job)


def test_backends_killed_again_and_again_lose_nothing(house: House, chance: random.Random) -> None:
    pool, journal = house.pool, house.journal
    for _ in range(6):
        journal.submit(3, payload={"command": ["true"]})
        victims = [row.pid for row in pool.rows(f"SELECT pid FROM pg_stat_activity WHERE {OURS} ORDER BY pid")]
        pool.rows("SELECT pg_terminate_backend(:pid)", pid=chance.choice(victims))
    pool.rows(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}")
    journal.submit(3, payload={"command": ["true"]})
    journal.wait()
    journal.check()


def test_running_work_is_kept_when_postgresql_itself_is_killed(scratch: Path, chance: random.Random) -> None:
    data = scratch / "server"
    with embedded.serve(data) as server:
        database = Database(server.url, DatabaseSettings(), role="test", chance=chance)
        migrate.upgrade(database)
        pool = Pool(database, PATIENT, chance)
        with Processes(scratch, server.url, PATIENT) as processes:
            processes.gateway()
            processes.assigner()
            processes.bot("bot-1")
            journal, gate = Journal(pool), scratch / "gate"
            job = slow_job(pool, journal, gate)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            with embedded.serve(data) as again:
                assert again.url == server.url
                gate.touch()
                journal.wait()
                journal.check()
                assert kept(pool, job)
                assert [finding for finding in invariants.verify(database) if finding.rows] == []
        database.close()


@pytest.mark.parametrize("told", [True, False])
def test_a_lease_that_a_bot_was_told_of_survives_a_crash_of_the_server_though_its_grant_did_not_wait_for_the_disk(
    scratch: Path, chance: random.Random, told: bool
) -> None:
    data = scratch / "server"
    with embedded.serve(data) as server:
        database = Database(server.url, DatabaseSettings(), role="test", chance=chance)
        migrate.upgrade(database)
        pool = Pool(database, PATIENT, chance)
        with database.connect() as outside:
            outside.session.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
            outside.session.execute("SELECT pg_reload_conf()")
        (job,) = pool.submit()
        bot = pool.bot()
        pool.assigner().run_once()
        assert pool.job(job).state == "leased"
        offered = bot.sync()["leases"] if told else []
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        with embedded.serve(data):
            row = pool.job(job)
            if told:
                assert (row.state, row.attempts, row.fence) == ("leased", 1, offered[0]["fence"])
            elif row.state == "queued":
                pool.assigner().run_once()
            assert bot.sync(*map(active, offered))["leases"]
            assert pool.job(job).state == ("running" if told else "leased")
            assert [finding for finding in invariants.verify(database) if finding.rows] == []
        database.close()
