"""The virtual clock of a database: nothing that tells the time by another clock goes unnoticed."""

import random
from datetime import UTC, datetime
from functools import partial

import pytest

from assigner.settings import PoolSettings
from assigner.simulation.clock import VirtualClock, count_escaped, find_escapes, make
from assigner.simulation.loop import living
from bots.protocol import OpenSession
from bots.simulation.bots import Run, simulated_bots
from bots.sync.fetch import FetchSettings
from schema import clock
from schema.moves.submit import submit
from schema.requests import JobRequest

START = datetime(2033, 5, 18, tzinfo=UTC).timestamp()
JOB = JobRequest(command=["run"]).normal()
PLANTED = """
ALTER TABLE instances ADD COLUMN a timestamptz DEFAULT pg_catalog.now(), ADD COLUMN b date DEFAULT CURRENT_DATE;
CREATE VIEW leasehold.late AS SELECT pg_catalog.clock_timestamp() AS at;
CREATE FUNCTION leasehold.hour() RETURNS timestamptz LANGUAGE sql AS 'SELECT CURRENT_TIMESTAMP';
CREATE FUNCTION leasehold.elsewhere() RETURNS timestamptz LANGUAGE sql SET search_path = leasehold AS 'SELECT now()';
"""


def test_definitions_and_rows_with_another_clock_are_found(empty_url: str) -> None:
    real, now = clock.wall(), VirtualClock(START)
    database, _ = make(empty_url, now, seed=1)
    assert database.run(find_escapes) == []
    assert database.run(lambda connection: connection.now()).timestamp() == START
    now.advance(START + 60)
    assert database.run(lambda connection: connection.now()).timestamp() == START + 60
    database.run(lambda connection: connection.execute_sql(PLANTED))
    assert database.run(find_escapes) == [
        "the default of instances.a",
        "the default of instances.b",
        "the view or rule on late",
        "the function elsewhere()",
        "the function hour()",
    ]
    database.run(lambda connection: connection.execute_sql("INSERT INTO instances (name) VALUES ('one')"))
    window = {"since": real - 60, "until": real + 3600}
    assert database.run(lambda connection: count_escaped(connection, **window)) == {"instances.a": 1}
    with pytest.raises(ValueError, match="does not go back"):
        now.advance(START)
    database.close()


def test_a_lost_bots_job_runs_again_within_the_bound_of_virtual_time(empty_url: str) -> None:
    begun: list[float] = []

    def runs(_work: object, _chance: random.Random) -> Run:
        begun.append(clock.monotonic())
        return Run(600.0)

    settings = PoolSettings()
    fetch, cooldown = FetchSettings(), settings.quotas.of_evictions
    bots_of = partial(simulated_bots, timing=settings.timing, fetch=fetch, cooldown=cooldown, runs=runs, seed=1)
    with living(empty_url, settings, bots_of, start=START, seed=1) as (pool, bots):
        bots.open(OpenSession(bot="one"), OpenSession(bot="two"))
        pool.at(START + 5, lambda: pool.database.run(lambda c: submit(c, [JOB], actor="test")))
        pool.run(START + 60)
        (first,) = begun
        assert first == START + 5, "an idle pool starts it at once"
        holder = next(name for name, bot in bots.bots.items() if bot.held)
        bots.kill(holder)
        pool.run(START + 1200)
        assert 0 < begun[1] - (START + 60) <= settings.timing.detect
        states = pool.database.run(lambda c: [row.state for row in c.execute_sql("SELECT state FROM jobs")])
        assert states == ["succeeded"]
