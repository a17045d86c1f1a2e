"""The assigners of one process: one thread per cohort while there is such a cohort, and none while it is drained."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
import structlog
import structlog.testing
from assigner.drains import assigners_group, drain_instance, undrain_instance

from assigner.config import Reloader
from assigner.installation import Installation, PoolSettings
from assigner.presence import Presence
from assigner.running import AssignerProcess
from assigner.staff import Staff
from schema import clock, drains
from schema.errors import BadInput, LeaseholdError, NotFound
from schema.wakeups import Wakeups
from tests.patience import eventually
from tests.pool import Pool

COHORTS = [{"kind": "cohort", "interval": 0.05, "jitter": 0.05}]


def settings(pool: Pool, *assigners: dict[str, object]) -> PoolSettings:
    return PoolSettings.model_validate({"assigners": assigners, "timing": pool.timing.model_dump()})


def cohort(pool: Pool, name: str, *labels: str) -> None:
    pool.change(
        "INSERT INTO cohorts (name, labels, position) VALUES (:name, :labels, 1)", name=name, labels=list(labels)
    )


def at_work() -> list[str]:
    """The threads of assigners."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("assigner-"))


@contextmanager
def staffed(pool: Pool, chosen: PoolSettings) -> Iterator[Staff]:
    presence = Presence(pool.database, "host", interval=0.1)
    wakeups = Wakeups(pool.database, enabled=False)
    staff = Staff(pool.database, chosen, name="host", wakeups=wakeups, presence=presence, chance=random.Random(1))
    try:
        staff.start()
        yield staff
    finally:
        staff.stop(clock.monotonic() + 10)
        assert at_work() == []


def test_bg_12_one_thread_per_cohort_comes_and_goes_with_the_cohort(pool: Pool) -> None:
    with staffed(pool, settings(pool, {"threads": 1}, *COHORTS)) as staff:
        assert at_work() == ["assigner-0-0"]
        staff.run_once()
        assert at_work() == ["assigner-0-0", "assigner-1-cohort-default"]
        cohort(pool, "linux", "linux")
        staff.run_once()
        staff.run_once()
        assert at_work() == ["assigner-0-0", "assigner-1-cohort-default", "assigner-1-cohort-linux"]
        pool.change("DELETE FROM cohorts WHERE name = 'linux'")
        staff.run_once()
        assert at_work() == ["assigner-0-0", "assigner-1-cohort-default"]


def test_bg_12_each_cohort_is_served_by_its_own_assigner_and_no_other(pool: Pool) -> None:
    cohort(pool, "linux", "linux", "fast")
    with staffed(pool, settings(pool, *COHORTS)) as staff:
        staff.run_once()
        pool.bot("plain")
        pool.bot("penguin", labels=["linux"])
        (anywhere,) = pool.submit()
        (there,) = pool.submit(label="linux")
        eventually(lambda: len(pool.rows("SELECT FROM live")) == 2)
    leases = pool.rows(
        "SELECT j.public_id, l.assigner, b.name FROM live l"
        " JOIN jobs j ON j.id = l.job_id JOIN bots b ON b.id = l.bot_id"
    )
    assert {(str(row.public_id), row.assigner, row.name) for row in leases} == {
        (anywhere, "host/0.cohort-default", "plain"),
        (there, "host/0.cohort-linux", "penguin"),
    }


def test_an_entry_restricted_to_cohorts_has_threads_for_these_and_a_reload_changes_which(pool: Pool) -> None:
    cohort(pool, "linux", "linux")
    with staffed(pool, settings(pool, COHORTS[0] | {"cohorts": ["linux", "absent"]})) as staff:
        staff.run_once()
        assert at_work() == ["assigner-0-cohort-linux"]
        staff.reconfigure(settings(pool, COHORTS[0] | {"cohorts": ["default"]}))
        staff.run_once()
        assert at_work() == ["assigner-0-cohort-default"]
        staff.reconfigure(settings(pool, {"kind": "priority-age"}))
        staff.run_once()
        assert at_work() == ["assigner-0-cohort-default"], "another kind needs a restart"


def test_a_cohort_made_anew_under_its_old_name_gets_an_assigner_for_the_new_one(pool: Pool) -> None:
    cohort(pool, "linux", "linux")
    with staffed(pool, settings(pool, *COHORTS)) as staff:
        staff.run_once()
        pool.change("DELETE FROM cohorts WHERE name = 'linux'")
        cohort(pool, "linux", "linux")
        staff.run_once()
        pool.bot(labels=["linux"])
        pool.submit(label="linux")
        eventually(lambda: pool.rows("SELECT FROM live"))


@contextmanager
def running(pool: Pool, name: str) -> Iterator[None]:
    chosen = settings(pool, {"threads": 2, "interval": 0.05, "jitter": 0.05}, *COHORTS)
    process = AssignerProcess(
        pool.database, Reloader(None, PoolSettings, {}, current=chosen), name=name, chance=random.Random(1)
    )
    process.start()
    try:
        yield
    finally:
        process.stop()


@pytest.fixture
def installation(database_url: str, tmp_path: Path) -> Installation:
    environment = {"LEASEHOLD_DATABASE_URL": database_url}
    return Installation(data=tmp_path, config=None, sections=PoolSettings, environ=environment)


@pytest.fixture(autouse=True)
def _logs_go_elsewhere() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


def said(capsys: pytest.CaptureFixture[str], command: click.Command, at: Installation, *arguments: str) -> str:
    command.main(list(arguments), prog_name="leasehold", standalone_mode=False, obj=at)
    return capsys.readouterr().out


def state(pool: Pool, name: str) -> str:
    (found,) = pool.database.run(lambda c: drains.assigners(c, name))
    return found.state


def test_a_drained_assigner_process_places_nothing_while_its_upkeep_goes_on(
    pool: Pool, installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.bot(capacity=5)
    with running(pool, "host"):
        assert json.loads(said(capsys, assigners_group, installation, "--json"))[0]["state"] == "running"
        out = said(capsys, assigners_group, installation, "drain", "host", "--wait", "--reason", "upgrade")
        assert out == "host places nothing any more\n"
        assert state(pool, "host") == "drained"
        assert "drained" in said(capsys, assigners_group, installation)
        (job,) = pool.submit()
        (late,) = pool.submit(queue_timeout_seconds=60)
        pool.change("UPDATE jobs SET queue_deadline = now() WHERE queue_deadline IS NOT NULL")
        eventually(lambda: pool.job(late).state == "dead", what="upkeep goes on")
        assert pool.job(job).state == "queued"

        assert said(capsys, assigners_group, installation, "undrain", "host") == "host may place jobs again\n"
        eventually(lambda: pool.job(job).state == "leased")
    assert state(pool, "host") == "stopped"
    assert [(row.action, row.actor, row.details) for row in pool.rows("SELECT * FROM audit ORDER BY id")] == [
        ("assigner.drain", "local", {"reason": "upgrade"}),
        ("assigner.undrain", "local", {"reason": ""}),
    ]


def test_the_drain_of_an_assigner_outlives_a_restart_and_waits_for_nobody_who_is_gone(
    pool: Pool, installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(pool, "host"):
        pass
    said(capsys, assigners_group, installation, "drain", "host", "--wait")
    pool.bot()
    (job,) = pool.submit()
    with running(pool, "host"):
        eventually(lambda: state(pool, "host") == "drained")
        assert pool.job(job).state == "queued"
    pool.change("UPDATE assigners SET stopped_at = NULL, seen_at = now() - interval '1 h'")
    assert state(pool, "host") == "dead"
    with pytest.raises(NotFound, match="no assigner process 'nobody'"):
        said(capsys, assigners_group, installation, "drain", "nobody")


def test_draining_an_instance_waits_until_it_runs_nothing(
    pool: Pool, installation: Installation, capsys: pytest.CaptureFixture[str]
) -> None:
    job, bot, work = pool.running(instance="ci")
    said(capsys, drain_instance, installation, "ci")
    assert pool.row("SELECT draining, drain_deadline FROM instances WHERE name = 'ci'")[:] == (True, None)
    said(capsys, drain_instance, installation, "ci", "--deadline", "0s")
    pool.upkeep().run_once()
    bot.sync()
    out = said(capsys, drain_instance, installation, "ci", "--wait", "--json")
    assert json.loads(out) == {"name": "ci", "draining": True}
    assert (pool.job(job).state, work["job"]) == ("queued", job)
    said(capsys, undrain_instance, installation, "ci")
    assert pool.row("SELECT draining FROM instances WHERE name = 'ci'").draining is False
    for wrong in (
        ["ci", "--deadline", "soon"],
        ["ci", "--deadline", "-1"],
        ["Not A Name"],
        ["ci", "--reason", "x" * 501],
    ):
        with pytest.raises((BadInput, click.UsageError)):
            said(capsys, drain_instance, installation, *wrong)


def test_waiting_for_an_instance_ends_when_somebody_takes_the_drain_back(
    pool: Pool, installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.running(instance="ci")

    def undrained(_seconds: float) -> None:
        pool.change("UPDATE instances SET draining = false")

    monkeypatch.setattr("schema.clock.sleep", undrained)
    with pytest.raises(LeaseholdError, match="taken that back"):
        drain_instance.main(["ci", "--wait"], prog_name="leasehold", standalone_mode=False, obj=installation)


def test_a_process_tells_what_its_assigners_serve_and_tells_it_anew_after_a_reload(pool: Pool) -> None:
    presence = Presence(pool.database, "host", interval=0.1)
    wakeups = Wakeups(pool.database, enabled=False)
    first, second = (settings(pool, {"instances": names}, {"kind": "cohort"}) for names in (["ci"], ["ci", "qa"]))
    staff = Staff(pool.database, first, name="host", wakeups=wakeups, presence=presence, chance=random.Random(1))
    presence.begin()
    everything = {"instances": None, "cohorts": None}
    told = "SELECT serves FROM assigners"
    assert pool.row(told).serves == [{"instances": ["ci"], "cohorts": None}, everything]
    staff.reconfigure(second)
    presence.run_once()
    assert pool.row(told).serves == [{"instances": ["ci", "qa"], "cohorts": None}, everything]
