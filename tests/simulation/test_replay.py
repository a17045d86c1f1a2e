"""`leasehold simulate` replays what a pool did, and tells how far the replay is from it."""

import dataclasses
import re
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from leasehold.errors import BadInput
from sqlalchemy import make_url

from assigner.simulation import history
from schema.accounting import simulations
from schema.policy import versions
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.urls import libpq_url
from tests.support.pool import Pool, active, completed
from tests.support.race import cancel
from tests.support.servers import Console

#: Puts the runs behind each other in the past: each took 2 s, and all had been queued together.
LONG_AGO = """
UPDATE jobs SET queued_at = now() - interval '200 s', created_at = now() - interval '200 s';
UPDATE leases l SET granted_at = now() - interval '200 s' + n.nth * interval '2 s',
    acknowledged_at = now() - interval '200 s' + n.nth * interval '2 s',
    ended_at = now() - interval '198 s' + n.nth * interval '2 s'
FROM (SELECT job_id, row_number() OVER (ORDER BY job_id) - 1 AS nth FROM leases) n WHERE n.job_id = l.job_id;
UPDATE bots SET opened_at = now() - interval '1 h'
"""
#: The columns of figures where policies are tried.
REAL_AND_TRIED = ["real", "replayed", "other.toml", "version 1"]


@pytest.fixture
def console(tmp_path: Path, leasehold: Path, database: Database) -> Console:
    return Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=database.url)


@pytest.fixture
def past(pool: Pool) -> list[Any]:
    """The jobs of a pool that has run 24 of them, one after the other, each for 2 s."""
    jobs = pool.submit(24, instance="red", label="nightly", locality_hint="here", timeout_seconds=60.0)
    bot, assigner = pool.bot(properties={"os": "linux"}), pool.assigner()
    for _ in jobs:
        assigner.run_once()
        for work in bot.take():
            bot.sync(completed(work))
    pool.change(LONG_AGO)
    return pool.rows("SELECT * FROM jobs ORDER BY id")


def figures(rows: list[str]) -> dict[tuple[str, ...], list[str]]:
    """Instance and figure → unit and values of a row, or values alone."""
    return {tuple(row.split()[:2]): row.split()[2:] for row in rows}


def test_what_has_run_for_long_is_taken_for_one_of_those_that_run_for_long(pool: Pool, past: list[Any]) -> None:
    pool.submit(2, instance="red")
    pool.bot("long", capacity=2)
    pool.assigner().run_once()
    pool.change("UPDATE leases SET ended_at = granted_at + interval '90 s' WHERE job_id IN (1, 2, 3)")
    pool.change("UPDATE jobs SET queued_at = now() - interval '50 s' WHERE id > 24")
    pool.change("UPDATE leases SET granted_at = now() - interval '20 s' WHERE job_id = 25")
    pool.change("UPDATE leases SET granted_at = now() WHERE job_id = 26")
    found = pool.database.run(lambda connection: history.read(connection, 300.0))
    assert [round(job.attempts[-1].seconds) for job in found.jobs[-2:]] == [90, 2]


@pytest.mark.long
def test_a_past_is_replayed_as_it_was_and_its_report_is_kept(
    pool: Pool, past: list[Any], console: Console, tmp_path: Path
) -> None:
    assert "'x' is not a duration" in console.refused("simulate", "--since", "x")
    assert console.refused("simulate", "--since", "91d").startswith("--since: must be from 1 min to 90 d")
    (tmp_path / "bad.toml").write_text("[assigners")
    assert console.refused("simulate", "--policy", "bad.toml").startswith("bad.toml:1: is not TOML")
    assert console.refused("simulate", "--title", " ") == "title: must be a line of 1 to 200 bytes"
    assert console.refused("simulate", "--policy", "7") == "policy: version 7 is not kept"
    done = console.run("simulate", "--since", "5m", "--html", "o.html", "--step", "1s", "--title", "As it was")
    assert (done.returncode, done.stderr) == (0, "Kept as simulation 1, for the console.\n")
    head, error, *others = done.stdout.splitlines()
    assert head.startswith("24 jobs on 1 bot, ")
    assert int(re.search(r"by up to (\d+)%", error)[1]) <= 5  # type: ignore[index]
    found = figures(others)
    real, unit, replayed, *_ = found["red", "longest"]
    assert unit == "s"
    assert [float(real), float(replayed)] == pytest.approx([46.0, 46.0], abs=1.0), "as fast as it was"
    assert found["all", "starts"] == ["24"] * 2
    assert pool.rows("SELECT * FROM jobs ORDER BY id") == past, "nothing is written in the live pool"
    assert (tmp_path / "o.html").read_text().count("<svg") == 4, "units and waits of what was and of the replay"
    kept = pool.database.run(lambda connection: simulations.simulation(connection, 1))
    assert kept is not None
    assert kept.report is not None
    assert kept.report["head"][0] == head
    assert pool.row("SELECT actor, action, subject FROM audit WHERE action = 'simulation.keep'") == (
        "local", "simulation.keep", "1",
    )  # fmt: skip


def test_a_time_without_jobs_is_refused(console: Console) -> None:
    assert "--since: there was no job in that time" in console.refused("simulate", "--since", "5m")


@pytest.mark.long
def test_a_past_is_replayed_under_policies_and_shaken_and_compared_with_what_was(
    pool: Pool, past: list[Any], console: Console, tmp_path: Path
) -> None:
    (tmp_path / "other.toml").write_text(
        "[[assigners]]\ninterval = 5.0\n[fetch]\nenabled = false\n[[schedules]]\n"
        "name = 'often'\ncron = '* * * * *'\njob = {command = ['true']}\n"
        "[[queues]]\nlabel = 'nightly'\nmax_queued = 1\n"
    )
    options = ("--bots", "+1", "--shake", "1", "--html", "o.html", "--step", "1s", "--title", "A second bot, packed")
    pool.database.run(lambda c: versions.note_change(c, actor="ann", reason=""))
    done = console.run("simulate", "--since", "5m", "--policy", "other.toml", "--policy", "1", *options)
    assert (done.returncode, done.stderr) == (0, "Kept as simulation 1, for the console.\n")
    text = done.stdout
    head, error, same, shaken, columns, *rows = text.splitlines()
    assert head.startswith("24 jobs on 1 bot, ")
    assert "1 replay with shaken arrivals" in shaken
    assert columns.split() == ["instance", "figure", "real", "replayed", "other.toml", "version", "1"]
    found = figures(rows)
    real, _, replayed, *_ = found["red", "longest"]
    assert found["red", "longest"][-1] != replayed, "a second bot halves the wait"
    assert [float(real), float(replayed)] == pytest.approx([46.0, 46.0], abs=1.0), "as fast as it was"
    assert found["all", "starts"] == ["24"] * 4
    assert pool.rows("SELECT * FROM jobs ORDER BY id") == past, "nothing is written in the live pool"
    assert max(map(len, text.splitlines())) <= 120
    page = (tmp_path / "o.html").read_text()
    assert page.count("<svg") == 8, "units and waits of what was, of the replay and of two policies"
    printed = text.rstrip()
    assert printed in page.replace("&#x27;", "'").replace("&lt;", "<")
    assert "<title>A second bot, packed</title>" in page
    kept = pool.database.run(lambda connection: simulations.simulation(connection, 1))
    assert kept is not None
    assert kept.report is not None
    assert kept.report["head"] == [head, error, same, shaken]
    assert (len(kept.report["rows"]), kept.report["columns"][2:]) == (len(printed.splitlines()) - 5, REAL_AND_TRIED)
    assert {(name, *sorted(kinds)) for name, kinds in kept.report["charts"].items()} == {
        (name, "units", "waits") for name in REAL_AND_TRIED
    }


SETTING = """
DO $$ BEGIN EXECUTE format('ALTER DATABASE %I {}', current_database()); END $$"""


def test_what_could_not_be_kept_is_told_before_anything_is_simulated(pool: Pool, console: Console) -> None:
    kept, draft = "the report cannot be kept in the pool", "the proposal cannot be kept as a draft"
    pool.submit()
    bot = pool.bot()
    pool.assigner().run_once()
    bot.sync(*map(completed, bot.take()))
    pool.database.run(lambda c: versions.note_change(c, actor="ann", reason=""))
    role = f"leasehold_test_{uuid4().hex[:12]}"
    pool.change(f"CREATE ROLE {role} LOGIN")
    pool.change(f"GRANT USAGE ON SCHEMA leasehold TO {role}")
    pool.change(f"GRANT SELECT ON ALL TABLES IN SCHEMA leasehold TO {role}")
    url = make_url(pool.database.url).set(username=role).render_as_string(hide_password=False)
    reader = {"LEASEHOLD_DATABASE_URL": url}
    try:
        told = console.refused("simulate", "--title", "a", code=3, environ=reader)
        assert told == f"{kept}: permission denied for table simulations"
        assert console.refused("tune", code=3, environ=reader).startswith(f"{draft}: permission denied for table ")
    finally:
        pool.change(f"DROP OWNED BY {role}")
        pool.change(f"DROP ROLE {role}")
    pool.change(SETTING.format("SET default_transaction_read_only = on"))
    assert console.refused("simulate", "--title", "a", code=3) == f"{kept}: the database is read-only"
    assert console.refused("tune", code=3) == f"{draft}: the database is read-only"
    with psycopg.connect(libpq_url(pool.database.url), autocommit=True) as admin:
        admin.execute("SET default_transaction_read_only = off")
        admin.execute(SETTING.format("RESET default_transaction_read_only"))
    assert pool.rows("SELECT FROM simulations UNION ALL SELECT FROM policies WHERE drafted") == []


def test_the_newest_hundred_reports_are_kept_and_no_other_is(pool: Pool) -> None:
    report = {"head": [], "columns": [], "rows": [], "losers": {}, "since": 0, "until": 1, "charts": {}}

    def kept(connection: Connection) -> int:
        return simulations.keep(connection, title="a", report=report, actor="test")

    numbers = [pool.database.run(kept) for _ in range(102)]
    left = pool.database.run(simulations.simulations)
    assert [each.id for each in left] == [*reversed(numbers)][:100]
    assert pool.database.run(lambda c: [s.id for s in simulations.simulations(c, before=numbers[-1], limit=1)]) == [
        numbers[-2]
    ]
    with pytest.raises(BadInput, match=r"report: has 4,194,3\d\d bytes, and at most 4,194,304 are kept"):
        pool.database.run(
            lambda c: simulations.keep(c, title="a", report={"head": ["x" * simulations.MOST_BYTES]}, actor="test")
        )


#: What is wrong → how many jobs and bots it is of.
WRONG = {
    "UPDATE platforms SET properties = '7' WHERE properties ? 'os'": (1, 0),
    """UPDATE platforms SET properties = '{"os": 7}' WHERE properties ? 'os'""": (1, 0),
    "UPDATE job_constraints SET priority_inputs = '7'": (1, 0),
    "UPDATE jobs SET queue = -queue WHERE label = 'wrong'": (1, 0),
    "UPDATE kinds SET properties = '7' WHERE properties ? 'os'": (0, 1),
}


@pytest.mark.breaks_invariants
@pytest.mark.parametrize("change", WRONG)
def test_a_job_or_bot_that_cannot_be_used_as_stored_is_left_out_and_counted(pool: Pool, change: str) -> None:
    pool.submit(2)
    own = {"estimated_cost": 2, "own": {"class": "random"}, "terms": {"job_class": "random"}}
    pool.submit(properties={"os": ["linux"]}, label="wrong", **own)
    pool.bot("bot-1")
    pool.bot("bot-2", properties={"os": "linux"})
    pool.change(change)
    past = pool.database.run(lambda connection: history.read(connection, 3600))
    jobs, bots = WRONG[change]
    assert (len(past.jobs), past.left_out) == (3 - jobs, {history.UNUSABLE: jobs} if jobs else {})
    assert (len(past.bots), past.bots_left_out) == (2 - bots, bots)


def test_jobs_that_retention_has_deleted_are_replayed_from_the_journal_as_they_were_from_the_tables(pool: Pool) -> None:
    """All kinds of ends: at a second attempt, cancelled while it waited and ran, lost with a bot that started anew."""
    own = {"estimated_cost": 2, "own": {"class": "random"}, "terms": {"job_class": "random", "owner": "ann"}}
    pool.submit(3, instance="red", label="nightly", locality_hint="here", priority=3, queue_timeout_seconds=900)
    pool.submit(retry_failed=True, max_attempts=7, properties={"os": ["linux"]}, **own)
    pool.submit(preferred_properties={"os": ["linux"]}, prefer_seconds=60, timeout_seconds=5.0)
    cancel(pool, *pool.submit())
    (stopped,) = pool.submit(units=2)
    offers: dict[str, Any] = {"capacity": 9, "properties": {"os": ["linux"]}}
    bot, assigner = pool.bot(**offers), pool.assigner()
    verdicts = chain(["failed"], repeat("succeeded"))
    for round_number in range(4):
        assigner.run_once()
        given = bot.take()
        if round_number == 0:
            bot = pool.restarted(bot, **offers)
            continue
        cancel(pool, stopped)
        stops = {each["job"] for each in bot.sync(*map(active, given))["leases"] if each["state"] == "cancelling"}
        bot.sync(
            *[completed(each, "stopped" if each["job"] in stops else next(verdicts), seconds=0.5) for each in given]
        )
        pool.change("UPDATE jobs SET schedule_after = NULL WHERE state = 'queued'")
    before = pool.database.run(lambda connection: history.read(connection, 3600))
    assert len(before.jobs) == 7
    pool.retention(keep_succeeded=0, keep_failed=0, keep_cancelled=0, keep_dead=0).run_once()
    assert pool.rows("SELECT FROM jobs UNION ALL SELECT FROM leases") == []
    after = pool.database.run(lambda connection: history.read(connection, 3600))
    assert (after.jobs, after.bots, after.guessed) == (before.jobs, before.bots, before.guessed)
    assert before.records is not None
    assert after.records is not None
    times = {name: getattr(before.records, name) for name in ("since", "until", "waits_from", "unit_seconds")}
    assert dataclasses.replace(after.records, **times) == before.records
    row = pool.row(
        "SELECT min(class) AS of_class, min(owner) AS owner, min(seconds) AS seconds, count(*) AS n FROM journal"
    )
    assert (row.of_class, row.owner, row.seconds, row.n) == ("random", "ann", 0.5, len(before.records.leases) + 1)
    assert pool.rows("SELECT bot FROM bot_sessions") == [("bot-1",)]
    pool.retention(keep_journal=0).run_once()
    assert pool.rows("SELECT FROM journal") == []
