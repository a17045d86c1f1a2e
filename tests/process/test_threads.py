"""The assigners of one process: one thread per cohort while there is such a cohort, and none while it is drained."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import structlog
import structlog.testing

from assigner.config.loading import Reloader
from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.process.assign import AssignerProcess
from assigner.process.policies import Trial
from assigner.process.threads import AssignerThreads, Presence
from assigner.settings import PoolSettings
from schema import clock
from schema.postgres.notify import Wakeups
from schema.tenancy import drains
from tests.support.patience import eventually, wait_instead
from tests.support.pool import Pool

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
def staffed(pool: Pool, chosen: PoolSettings) -> Iterator[AssignerThreads]:
    presence = Presence(pool.database, "host", interval=0.1)
    wakeups = Wakeups(pool.database, enabled=False)
    assigner_threads = AssignerThreads(
        pool.database, chosen, name="host", wakeups=wakeups, presence=presence, chance=random.Random(1)
    )
    try:
        assigner_threads.start()
        yield assigner_threads
    finally:
        assigner_threads.stop(clock.monotonic() + 10)
        assert at_work() == []


def test_one_thread_per_cohort_comes_and_goes_with_the_cohort(pool: Pool) -> None:
    with staffed(pool, settings(pool, {"threads": 1}, *COHORTS)) as assigner_threads:
        assert at_work() == ["assigner-0-0"]
        assigner_threads.run_once()
        assert at_work() == ["assigner-0-0", "assigner-1-cohort-default"]
        cohort(pool, "linux", "linux")
        assigner_threads.run_once()
        assigner_threads.run_once()
        assert at_work() == ["assigner-0-0", "assigner-1-cohort-default", "assigner-1-cohort-linux"]
        pool.change("DELETE FROM cohorts WHERE name = 'linux'")
        assigner_threads.run_once()
        assert at_work() == ["assigner-0-0", "assigner-1-cohort-default"]


def test_each_cohort_is_served_by_its_own_assigner_also_one_that_was_made_anew(pool: Pool) -> None:
    cohort(pool, "linux", "linux", "fast")
    with staffed(pool, settings(pool, *COHORTS)) as assigner_threads:
        assigner_threads.run_once()
        pool.change("DELETE FROM cohorts WHERE name = 'linux'")
        cohort(pool, "linux", "linux", "fast")
        assigner_threads.run_once()
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
    with staffed(pool, settings(pool, COHORTS[0] | {"cohorts": ["linux", "absent"]})) as assigner_threads:
        assigner_threads.run_once()
        assert at_work() == ["assigner-0-cohort-linux"]
        assigner_threads.reconfigure(settings(pool, COHORTS[0] | {"cohorts": ["default"]}))
        assigner_threads.run_once()
        assert at_work() == ["assigner-0-cohort-default"]
        assigner_threads.reconfigure(settings(pool, {"kind": "priority-age"}))
        assigner_threads.run_once()
        assert at_work() == ["assigner-0-cohort-default"], "another kind needs a restart"


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


@pytest.fixture(autouse=True)
def _logs_go_elsewhere() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


Answer = Callable[..., tuple[int, str]]


def said(operate: Answer, *arguments: str) -> str:
    code, told = operate(*arguments)
    assert code == 0, told
    return told


def state(pool: Pool, name: str) -> str:
    (found,) = pool.database.run(lambda c: drains.assigners(c, name))
    return found.state


def test_a_drained_assigner_process_places_nothing_while_its_upkeep_goes_on(pool: Pool, operate: Answer) -> None:
    pool.bot(capacity=5)
    with running(pool, "host"):
        assert json.loads(said(operate, "assigners", "--json"))[0]["state"] == "running"
        out = said(operate, "assigners", "drain", "host", "--wait", "--reason", "upgrade")
        assert out == "host places nothing any more\n"
        assert state(pool, "host") == "drained"
        assert "drained" in said(operate, "assigners")
        (job,) = pool.submit()
        (late,) = pool.submit(queue_timeout_seconds=60)
        pool.change("UPDATE jobs SET queue_deadline = now() WHERE queue_deadline IS NOT NULL")
        eventually(lambda: pool.job(late).state == "dead", what="upkeep goes on")
        assert pool.job(job).state == "queued"

        assert said(operate, "assigners", "undrain", "host") == "host may place jobs again\n"
        eventually(lambda: pool.job(job).state == "leased")
    assert state(pool, "host") == "stopped"
    (token,) = pool.rows("SELECT id FROM tokens")
    noted = pool.rows("SELECT * FROM audit WHERE action LIKE 'assigner.%' ORDER BY id")
    assert [(row.action, row.actor, row.details) for row in noted] == [
        ("assigner.drain", f"operator:{token.id}", {"reason": "upgrade"}),
        ("assigner.undrain", f"operator:{token.id}", {"reason": ""}),
    ]


def test_the_drain_of_an_assigner_outlives_a_restart_and_waits_for_nobody_who_is_gone(
    pool: Pool, operate: Answer
) -> None:
    with running(pool, "host"):
        pass
    said(operate, "assigners", "drain", "host", "--wait")
    pool.bot()
    (job,) = pool.submit()
    with running(pool, "host"):
        eventually(lambda: state(pool, "host") == "drained")
        assert pool.job(job).state == "queued"
    pool.change("UPDATE assigners SET stopped_at = NULL, seen_at = now() - interval '1 h'")
    assert state(pool, "host") == "dead"
    assert operate("assigners", "drain", "nobody") == (2, "error: assigner: no assigner process 'nobody'\n")


def test_draining_an_instance_waits_until_it_runs_nothing(pool: Pool, operate: Answer) -> None:
    job, bot, work = pool.running(instance="ci")
    said(operate, "instance", "drain", "ci")
    assert pool.row("SELECT draining, drain_deadline FROM instances WHERE name = 'ci'")[:] == (True, None)
    said(operate, "instance", "drain", "ci", "--deadline", "0s")
    pool.upkeep().run_once()
    bot.sync()
    out = said(operate, "instance", "drain", "ci", "--wait", "--json")
    assert json.loads(out) == {"name": "ci", "draining": True}
    assert (pool.job(job).state, work["job"]) == ("queued", job)
    said(operate, "instance", "undrain", "ci")
    assert pool.row("SELECT draining FROM instances WHERE name = 'ci'").draining is False
    for wrong in (["ci", "--deadline", "soon"], ["ci", "--deadline", "-1"], ["No Name"], ["ci", "--reason", "x" * 501]):
        code, told = operate("instance", "drain", *wrong)
        assert (code, told.count("\n")) == (2, 1)


def test_waiting_for_an_instance_ends_when_somebody_takes_the_drain_back(
    pool: Pool, operate: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.running(instance="ci")

    def undrained(_seconds: float) -> None:
        pool.change("UPDATE instances SET draining = false")

    wait_instead(monkeypatch, "sleep", undrained)
    code, told = operate("instance", "drain", "ci", "--wait")
    assert (code, "ended the drain" in told) == (1, True)


def test_a_process_tells_what_its_assigners_serve_and_tells_it_anew_after_a_reload(pool: Pool) -> None:
    presence = Presence(pool.database, "host", interval=0.1)
    wakeups = Wakeups(pool.database, enabled=False)
    first, second = (settings(pool, {"instances": names}, {"kind": "cohort"}) for names in (["ci"], ["ci", "qa"]))
    assigner_threads = AssignerThreads(
        pool.database, first, name="host", wakeups=wakeups, presence=presence, chance=random.Random(1)
    )
    presence.begin()
    everything = {"instances": None, "cohorts": None}
    told = "SELECT serves FROM assigners"
    assert pool.row(told).serves == [{"instances": ["ci"], "cohorts": None}, everything]
    assigner_threads.reconfigure(second)
    presence.run_once()
    again = [{"instances": ["ci", "qa"], "cohorts": None}, everything]
    assert pool.row(told).serves == [{**each, "tries": False} for each in again]


def test_a_trial_that_begins_while_the_thread_of_the_last_one_is_in_a_cycle_gets_its_own_thread(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assigner.process.threads.STOP_WITHIN", 0.0)
    monkeypatch.setattr(PriorityAgeAssigner, "run_once", lambda _: 600.0 if goes_on.wait(60) else 0.0)
    chosen, goes_on = settings(pool, {"threads": 1}), threading.Event()
    with staffed(pool, chosen) as assigner_threads:
        for trial in (Trial((1,), (0,), chosen), None, Trial((1,), (0,), chosen)):
            assigner_threads.reconfigure(chosen, trial=trial)
        (old,) = [each for each in threading.enumerate() if each.name == "assigner-0-canary"]
        goes_on.set()
        old.join(60)
        assigner_threads.tend()
        assert at_work() == ["assigner-0-0", "assigner-0-canary"]
