"""What `explain` costs does not grow with the queue, and with the fleet only up to a bound."""

from typing import NamedTuple

import pytest
from sqlalchemy import Connection, text

from assigner.explain import explain
from schema.engine import Database
from schema.evidence import AHEAD, BOTS_LOOK, COMPARISONS
from tests import filling
from tests.plans import Watch, watching

KINDS = ("free", "full", "absent")
INSTANCES = 2
JOBS, BOTS = 100_000, 5_000
#: Statements that fill the queue, each of which has to end within its timeout on a busy machine.
PARTS = 10
#: Jobs that are counted, bots that are looked at with their requirement sets, and a few rows of everything else.
BOUND = AHEAD + 3 * BOTS_LOOK + COMPARISONS + 200
LAST = text("""
SELECT j.public_id FROM jobs j JOIN platforms p ON p.id = j.platform
WHERE j.state = 'queued' AND p.properties @> jsonb_build_object('kind', jsonb_build_array(CAST(:kind AS text)))
ORDER BY j.priority DESC, j.queued_at DESC, j.id DESC LIMIT 1
""")


class Cost(NamedTuple):
    """What one answer took."""

    watch: Watch
    sentence: str


@pytest.fixture
def filled(database: Database) -> Database:
    """A pool with a deep queue and a large fleet, and no statistics of either."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=INSTANCES, kinds=KINDS)
        for _ in range(PARTS):
            filling.fill_jobs(connection, JOBS // PARTS, instances=INSTANCES, kinds=KINDS)
        filling.fill_bots(connection, {"free": BOTS // 2, "full": BOTS // 2})
        filling.occupy(connection, "full", leaving=0)

    database.run(lambda connection: connection.execute(text("ALTER TABLE jobs SET (autovacuum_enabled = off)")))
    database.run(fill)
    return database


def cost(database: Database, kind: str, *, instances: list[str] | None) -> Cost:
    """Explain the last job of all that want a bot of this kind."""
    with database.engine.connect() as connection:
        job = str(connection.execute(LAST, {"kind": kind}).scalar_one())
        with watching(connection) as watch:
            found = explain(connection, job, instances=instances, cooldown=600)
        connection.rollback()
    assert found is not None
    return Cost(watch, found.sentence)


def test_explain_reads_a_bounded_number_of_rows_behind_100000_jobs(filled: Database) -> None:
    for analysed in (False, True):
        if analysed:
            filled.run(lambda connection: connection.execute(text("ANALYZE")))
        for kind in KINDS:
            for instances in (None, ["i-0", "i-1"]):
                watch, sentence = cost(filled, kind, instances=instances)
                assert not watch.whole_scans(), f"{kind}: {watch}"
                assert watch.touched <= BOUND, f"{kind}, {sentence}: {watch}"
