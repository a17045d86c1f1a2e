"""Processes that put a policy into force are killed in the middle: the old version is in force whole, or the new."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from assigner.config import loading
from assigner.process.policies import file_digest
from assigner.settings import PoolSettings
from schema.policy import versions
from schema.postgres.statements import Statement
from schema.requests import JobRequest
from schema.timing import Timing
from tests.support.patience import eventually
from tests.support.pool import Pool, completed
from tests.support.race import BLOCKED, PID
from tests.support.servers import Process, Processes
from tests.support.tenancy import Tenancy, put_cohort

pytestmark = pytest.mark.conflicts

FILE = """
[[instances]]
name = "ci"
weight = 2.0
max_concurrent = {0}

[[rates]]
resource = "cli"
per_second = {0}

[[windows]]
name = "night"
start = {0}
end = 20
"""
#: What is written near the end of each change, after most of its limits: the row that the process waits for.
LEVEL = "SELECT FROM service_levels WHERE name = 'economy' FOR UPDATE"
A_JOB = "SELECT FROM jobs WHERE public_id = CAST(:job AS uuid) FOR UPDATE"
A_FILE = "INSERT INTO policy_files (digest) VALUES (:digest)"
A_QUOTA = "SELECT FROM quotas FOR UPDATE"

#: A transaction may be idle for as long as a process takes until it looks.
PATIENT = Statement("SET LOCAL idle_in_transaction_session_timeout = 0")


@contextmanager
def in_the_way(
    pool: Pool, process: Process, statement: str, act: Callable[[], object], **values: Any
) -> Iterator[None]:
    """Kill the process while it waits for what the statement locks or writes, which `act` lets it come to; inside,
    nothing is decided yet."""
    with pool.database.connect() as connection:
        connection.execute(PATIENT)
        connection.execute(Statement(statement), values)
        holder: int = connection.execute(PID).scalar_one()
        try:
            act()
            eventually(lambda: pool.database.run(lambda c: c.execute(BLOCKED, {"holder": holder}).scalar_one()))
            process.kill()
            yield
        finally:
            connection.rollback()


def whole(pool: Pool) -> int:
    """The number of the version in force, which everything that operators set agrees with."""
    found = pool.database.run(versions.in_force)
    assert found is not None
    assert found.content is not None
    assert pool.database.run(lambda c: versions.read(c, found.content["settings"])) == found.content  # type: ignore[index]
    return found.id


def assert_settled(pool: Pool, name: str, version: int) -> None:
    """Assert that this version is in force, once the server has noticed that the process is gone."""
    sql = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE :name"
    eventually(lambda: not pool.rows(sql, name=f"leasehold-%{name}%"), what="its transaction is undone")
    assert whole(pool) == version


def maximums(pool: Pool) -> dict[str, int | None]:
    """The maximum of instance `ci` in each cohort."""
    found = pool.database.run(lambda c: versions.read(c, {}))["limits"]["quota"]
    return {name.partition("/")[0]: terms["max"] for name, terms in found.items()}


def limited(pool: Pool) -> tuple[Any, ...]:
    """What the file says three times."""
    found = pool.database.run(lambda c: versions.read(c, {}))["limits"]
    return (
        found["account"]["ci"]["max_concurrent"], found["rate"]["cli"]["per_second"], found["window"]["night"]["start"],
    )  # fmt: skip


def asked(processes: Processes, path: str) -> Callable[[], None]:
    """Ask the gateway in a thread of its own; it is killed before it answers."""

    def ask() -> None:
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{processes.url}/v1/{path}", json={}, headers=headers, timeout=60.0, trust_env=False)

    headers = {"Authorization": f"Bearer {processes.operator_token}"}
    return lambda: Thread(target=ask).start()


@pytest.mark.parametrize("moment", ["within", "after"])
def test_a_gateway_killed_while_it_activates_leaves_the_old_version_or_the_new_one_with_its_priorities(
    operator: httpx.Client, pool: Pool, scratch: Path, database_url: str, timing: Timing, moment: str
) -> None:
    """`within`: after most limits are written; `after`: the version is in force, and the waiting jobs get theirs."""
    for number in (20, 70):
        operator.put("/v1/limits", json={"max_concurrent": number})
        operator.put("/v1/rates/cli", json={"per_second": number})
        operator.put("/v1/service-levels/economy", json={"points": number, "timeout_seconds": 60})
        operator.put("/v1/classes/nightly", json={"points": number})
    (job,) = pool.submit(**JobRequest(command=["true"], job_class="nightly").normal())
    priorities = {4: 80, 8: 30}
    assert pool.job(job).priority == priorities[whole(pool)]
    held = {"within": partial(in_the_way, statement=LEVEL), "after": partial(in_the_way, statement=A_JOB, job=job)}
    with Processes(scratch, database_url, timing) as running:
        gateway = running.gateway()
        with held[moment](pool, gateway, act=asked(running, "policies/4/activate")):
            assert whole(pool) == {"within": 8, "after": 4}[moment]
    assert_settled(pool, "gateway", {"within": 8, "after": 4}[moment])
    pool.upkeep().run_once()
    assert pool.job(job).priority == priorities[whole(pool)]
    for wanted in (4, 8):
        assert operator.post(f"/v1/policies/{wanted}/activate", json={}).json() == {"id": wanted, "kept": []}
        assert (whole(pool), pool.job(job).priority) == (wanted, priorities[wanted])


def test_an_assigner_killed_while_it_reads_its_file_leaves_the_policy_as_it_was_and_another_one_reads_it(
    operator: httpx.Client, pool: Pool, scratch: Path, database_url: str, timing: Timing
) -> None:
    with Processes(scratch, database_url, timing, config=FILE.format(7)) as running:
        process = running.assigner("host")
        assert whole(pool) == 1
        running.config.write_text(running.config.read_text().replace("= 7", "= 9"))
        digest = file_digest(loading.load(running.config, PoolSettings, {}))
        with in_the_way(pool, process, A_FILE, partial(process.signal, signal.SIGHUP), digest=digest):
            assert (whole(pool), limited(pool)) == (1, (7, 7, 7))
        assert_settled(pool, "host", 1)
        running.assigner("host")
        assert (whole(pool) > 1, limited(pool)) == (True, (9, 9, 9))
    assert operator.post("/v1/policies/1/activate", json={}).json() == {"id": 1, "kept": []}
    assert (whole(pool), limited(pool)) == (1, (7, 7, 7))


def test_an_assigner_killed_in_a_step_of_a_canary_leaves_the_step_before_and_another_one_makes_it(
    operator: httpx.Client, pool: Pool, tenancy: Tenancy, scratch: Path, database_url: str, timing: Timing
) -> None:
    for name in "ab":
        put_cohort(pool, name, name)
        tenancy.quota("ci", cohort=name, maximum=9)
    operator.put("/v1/rates/cli", json={"per_second": 1})
    wanted = {"quota": {f"{name}/ci": {"max": 2} for name in "ab"}}
    draft = operator.post("/v1/policies", json={"settings": {}, "limits": wanted}).json()["id"]
    trial = {"on": ["cohort:a", "cohort:b"], "steps": [50, 100], "every": 600, "guards": ["failures<=9"], "least": 1}
    assert operator.post(f"/v1/policies/{draft}/canary", json=trial).status_code == 200
    pool.submit(instance="ci", label="a")
    bot = pool.bot(labels=["a"])
    pool.assigner().run_once()
    bot.sync(*[completed(work) for work in bot.take()])

    with Processes(scratch, database_url, timing, config="") as running:
        process = running.assigner("watcher")
        first = whole(pool)
        late = partial(pool.change, "UPDATE policy_canaries SET step_at = step_at - interval '1 hour'")
        with in_the_way(pool, process, A_QUOTA, late):
            assert (whole(pool), maximums(pool)) == (first, {"a": 2, "b": 9})
        assert_settled(pool, "watcher", first)
        assert pool.row("SELECT step FROM policy_canaries").step == 0
        running.assigner("another")
        eventually(lambda: maximums(pool) == {"a": 2, "b": 2})
        assert pool.row("SELECT step FROM policy_canaries").step == 1
    assert whole(pool) > first
    assert operator.post("/v1/policies/canary/stop", json={}).status_code == 200
    assert (whole(pool) > first, maximums(pool)) == (True, {"a": 9, "b": 9})
