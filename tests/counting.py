"""Counting successes in a test's own pool: the policy, jobs that end on given bots, and what was counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from schema import success
from schema.success import SuccessSettings
from tests.pool import Bot, Pool, active, completed

ACTOR = "test"
#: One job is ready and all the others rest.
ONLY = """
UPDATE jobs SET considered = 0, schedule_after =
    CASE WHEN public_id <> CAST(:job AS uuid) THEN now() + interval '1 hour' END WHERE state = 'queued'
"""


def count(pool: Pool, **settings: Any) -> None:
    """Count from now on, by these settings."""
    wanted = SuccessSettings(**{"statistics": True, **settings})
    pool.database.run(lambda connection: success.declare(connection, wanted, actor=ACTOR))


@contextmanager
def only(pool: Pool, bot: Bot) -> Iterator[None]:
    """Nothing starts on any other bot meanwhile."""
    pool.change("UPDATE bots SET draining = true WHERE name <> :name", name=bot.session.bot)
    yield
    pool.change("UPDATE bots SET draining = false")


def given(pool: Pool, bot: Bot, job: str) -> dict[str, Any]:
    """The lease of a queued job that only this bot may have, which it runs."""
    pool.change(ONLY, job=job)
    with only(pool, bot):
        pool.assigner().run_once()
    work = next(each for each in bot.sync()["leases"] if each["job"] == job)
    bot.sync(active(work))
    return work


def ends(pool: Pool, bot: Bot, job: str, verdict: str = "succeeded") -> None:
    """The bot runs the job, and so it ends."""
    bot.sync(completed(given(pool, bot, job), verdict))


def work_off(pool: Pool, bot: Bot, verdict: str = "succeeded", *, jobs: int = 1, **fields: Any) -> list[str]:
    """Jobs that the bot runs one after the other, all with this end."""
    found = pool.submit(jobs, **fields)
    for job in found:
        ends(pool, bot, job, verdict)
    return found


def counts(pool: Pool, *columns: str) -> dict[tuple[str, str], tuple[float, ...]]:
    """(bot, label) -> its successes and failures, or these columns."""
    named = ", ".join(columns or ("successes", "failures"))
    rows = pool.rows(f"SELECT b.name, s.label, {named} FROM bot_success s JOIN bots b ON b.id = s.bot_id")
    return {(row[0], row[1]): tuple(round(value, 6) for value in row[2:]) for row in rows}


def blamed(pool: Pool) -> list[tuple[str | None, bool]]:
    """Which bot each job that is to be tried again was charged to, and whether that was upheld."""
    rows = pool.rows(
        "SELECT b.name, m.upheld_at IS NOT NULL AS upheld FROM blames m LEFT JOIN bots b ON b.id = m.bot_id"
        " ORDER BY m.job_id"
    )
    return [(row.name, row.upheld) for row in rows]


def on_probation(pool: Pool) -> list[str]:
    """Names of the bots that are."""
    return [row.name for row in pool.rows("SELECT name FROM bots WHERE probation_until IS NOT NULL ORDER BY name")]
