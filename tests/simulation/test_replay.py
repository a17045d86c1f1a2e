"""`leasehold simulate` replays what a pool did, and tells how far the replay is from it."""

import re
from pathlib import Path

import pytest

from schema.postgres.engine import Database
from tests.support.pool import Pool, completed
from tests.support.servers import Console

#: Puts the runs behind each other in the past: each took 2 s, and all had been queued together.
LONG_AGO = """
UPDATE jobs SET queued_at = now() - interval '200 s', created_at = now() - interval '200 s';
UPDATE leases l SET granted_at = now() - interval '200 s' + n.nth * interval '2 s',
    acknowledged_at = now() - interval '200 s' + n.nth * interval '2 s',
    ended_at = now() - interval '198 s' + n.nth * interval '2 s'
FROM (SELECT job_id, row_number() OVER (ORDER BY job_id) - 1 AS nth FROM leases) n WHERE n.job_id = l.job_id
"""


@pytest.fixture
def console(tmp_path: Path, leasehold: Path, database: Database) -> Console:
    return Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=database.url)


def test_a_past_is_replayed_and_compared_with_what_was(pool: Pool, console: Console, tmp_path: Path) -> None:
    assert "the pool had no job in that time" in console.refused("simulate", "--since", "5m")
    assert "'x' is not a duration" in console.refused("simulate", "--since", "x")
    assert console.refused("simulate", "--since", "30d").startswith("--since: must be from 1 min to 1 d")
    (tmp_path / "bad.toml").write_text("[assigners")
    assert console.refused("simulate", "--policy", "bad.toml").startswith("bad.toml:1: is not TOML")
    jobs = pool.submit(24, instance="red", label="nightly", locality_hint="here", timeout_seconds=60.0)
    bot, assigner = pool.bot(properties={"os": "linux"}), pool.assigner()
    for _ in jobs:
        assigner.run_once()
        for work in bot.take():
            bot.sync(completed(work))
    pool.change(LONG_AGO)
    before = pool.rows("SELECT * FROM jobs ORDER BY id")
    (tmp_path / "other.toml").write_text(
        "[[assigners]]\ninterval = 5.0\n[fetch]\nenabled = false\n[[schedules]]\n"
        "name = 'often'\ncron = '* * * * *'\njob = {command = ['true']}\n"
        "[[queues]]\nlabel = 'nightly'\nmax_queued = 1\n"
    )
    text = console.good("simulate", "--since", "5m", "--policy", "other.toml")
    head, error, _, columns, *rows = text.splitlines()
    assert head.startswith("24 jobs on 1 bot, ")
    assert columns.split() == ["instance", "wait", "real", "replayed", "other.toml"]
    assert int(re.search(r"by up to (\d+)%", error)[1]) <= 5  # type: ignore[index]
    found = {tuple(row.split()[:2]): row.split()[2:] for row in rows}
    real, unit, replayed, *_ = found["red", "longest"]
    assert unit == "s"
    assert [float(real), float(replayed)] == pytest.approx([46.0, 46.0], abs=1.0), "as fast as it was"
    assert found["all", "starts"] == ["24", "24", "24"]
    assert pool.rows("SELECT * FROM jobs ORDER BY id") == before, "nothing is written in the live pool"
    assert max(map(len, text.splitlines())) <= 120
