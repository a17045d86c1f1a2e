"""The statements that count successes and read them read what they need and no more, with any statistics or none."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from schema.fleet import success
from schema.moves.end import AttemptEnd, Verdict, end
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.plans import KNOWLEDGE, Acts, Measured, filled, measured_acts
from tests.support.servers import Databases

BATCH, BOTS, LABELS, BLAMES = 10, 3_000, 10, 10_000
#: Tables of one row, or with one for each thing that an operator has set.
SETTINGS = {"success_policy", "quotas", "instances", "cohorts"}
# Every busy bot has counts for ten labels; every tenth of the jobs that run failed somewhere before.
PART = (
    "INSERT INTO success_policy (memory, probation_failures, probation_seconds) VALUES (100, 3, 600)",
    "INSERT INTO bot_success (bot_id, label, successes, failures)"
    " SELECT b.id, CASE n WHEN 0 THEN '' ELSE 'l-' || n END, 3, 1"
    f" FROM bots b CROSS JOIN generate_series(0, {LABELS - 1}) n",
    "INSERT INTO blames (job_id, bot_id) SELECT j.id, b.id FROM (SELECT id FROM jobs WHERE state = 'queued' ORDER BY id"
    f" LIMIT {BLAMES}) j CROSS JOIN (SELECT min(id) AS id FROM bots) b",
    "INSERT INTO blames (job_id, bot_id) SELECT l.job_id, l.bot_id + 1 FROM (SELECT job_id, bot_id FROM live ORDER BY"
    " job_id LIMIT 10) l WHERE l.job_id % 2 = 0",
    "UPDATE blames m SET upheld_at = now(), bot_id = 1 + m.job_id % 5"
    " WHERE job_id IN (SELECT job_id FROM blames ORDER BY job_id DESC LIMIT 20)",
)
HELD = Statement("SELECT job_id, fence, bot_id, bot_epoch FROM live ORDER BY job_id LIMIT :limit")

Held = list[tuple[int, int, int, int]]
Act = Callable[[Held, Connection], object]


def _end(verdict: Verdict) -> Act:
    return lambda held, connection: end(connection, [AttemptEnd(*each, verdict) for each in held], actor="test")


ACTS: dict[str, Act] = {
    "succeed": _end(Verdict.SUCCEEDED),
    "fail": _end(Verdict.FAILED),
    "lose": _end(Verdict.LOST),
    "labels": lambda held, connection: success.job_labels(connection, [job for job, *_ in held]),
    "rates": lambda held, connection: success.success_rates(connection, [bot for *_, bot, _ in held], ["", "l-1"]),
    "review": lambda _, connection: success.review_probation(connection),
}
BOUND = 60 * BATCH
TABLES = ("jobs", "leases", "bots", "kind_platforms", "bot_success", "blames")


def _fill(connection: Connection) -> None:
    filling.fill_queues(connection, instances=1, kinds=["full"])
    filling.fill_jobs(connection, 3 * BLAMES, instances=1, kinds=["full"])
    filling.fill_bots(connection, {"full": BOTS})
    filling.occupy(connection, "full", leaving=0)
    for statement in PART:
        connection.execute(Statement(statement))


@pytest.fixture(scope="module")
def measured(databases: Databases, template: str) -> Iterator[Measured]:
    """Fill a pool whose bots are busy and known, and watch every statement."""
    with filled(databases, template, TABLES) as database:
        database.run(_fill)
        yield measured_acts(database, _acts)


def _acts(connection: Connection) -> Acts:
    held: Held = [tuple(row) for row in connection.execute(HELD, {"limit": BATCH})]  # type: ignore[misc]
    return {name: partial(act, held) for name, act in ACTS.items()}


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
@pytest.mark.parametrize("name", ACTS)
def test_a_statement_of_success_reads_no_table_whole_and_rows_in_proportion_to_its_batch(
    measured: Measured, name: str, knowledge: str
) -> None:
    watch = measured.watches[knowledge, name]
    assert watch.plans, "it was not executed"
    assert watch.whole_scans() <= SETTINGS, watch
    assert watch.touched <= BOUND, watch
