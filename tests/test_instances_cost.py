"""What operators see of instances costs neither the finished jobs nor what other instances run."""

import pytest
from sqlalchemy import Connection

from schema import instances, moves
from tests import filling
from tests.plans import watching
from tests.pool import Pool

INSTANCES, QUEUED, FINISHED, RUNNING = 10, 500, 20_000, 1_000
KINDS = ("free", "full")


@pytest.fixture(params=["no statistics", "statistics"])
def filled(request: pytest.FixtureRequest, pool: Pool) -> Pool:
    """Ten instances with queued, resting and many finished jobs; the first one runs a thousand jobs."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=INSTANCES, kinds=KINDS)
        filling.fill_jobs(connection, FINISHED, instances=INSTANCES, kinds=KINDS, state="succeeded")
        filling.fill_jobs(connection, QUEUED, instances=INSTANCES, kinds=KINDS)
        filling.fill_jobs(connection, QUEUED // 10, instances=INSTANCES, kinds=KINDS, backoff=60.0)
        filling.fill_bots(connection, {"full": RUNNING})
        filling.occupy(connection, "full", leaving=0)

    for table in ("jobs", "leases", "bots"):
        pool.change(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
    pool.database.run(fill)
    if request.param == "statistics":
        pool.change("ANALYZE")
    return pool


def test_a_list_of_instances_reads_what_waits_and_what_runs_once(filled: Pool) -> None:
    with filled.database.engine.connect() as connection:
        with watching(connection) as watch:
            found = instances.instances(connection)
        connection.rollback()
    assert sum(one.queued for one in found) == QUEUED + QUEUED // 10
    assert min(one.queued for one in found if one.name.startswith("i-")) >= QUEUED // INSTANCES
    assert [one.running for one in found if one.running] == [RUNNING]
    assert not watch.whole_scans() & {"jobs", "leases", "bots"}, str(watch)
    assert watch.touched <= QUEUED * 1.1 + RUNNING + 20 * INSTANCES, str(watch)


def test_a_drained_instance_whose_time_is_over_costs_nothing_of_what_others_run(filled: Pool) -> None:
    filled.change("UPDATE instances SET draining = true, drain_deadline = now() - interval '1 s' WHERE name = 'i-5'")
    with filled.database.engine.connect() as connection:
        with watching(connection) as watch:
            assert moves.stop_drained(connection, 100, sync=1, actor="test") == 0
        connection.rollback()
    assert not watch.whole_scans() & {"jobs", "leases", "bots"}, str(watch)
    assert watch.touched <= 50, str(watch)
