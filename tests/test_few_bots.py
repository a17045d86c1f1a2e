"""Few bots that serve a tenant are found among thousands that serve others only."""

import random

import pytest
from sqlalchemy import Connection

from schema import candidates, ready
from schema.candidates import Wanted
from schema.ready import Order, Scope
from tests import filling
from tests.explaining import explained, gates_of
from tests.pool import Pool

BOTS, TRIES = 3_000, 5
KIND = {"kind": ["free"]}


@pytest.fixture(params=["instance", "pool", "all"])
def crowded(request: pytest.FixtureRequest, pool: Pool) -> str:
    """Three thousand free bots serve team-b, and one serves team-a: it alone, its pool, or everybody. A job waits."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=("free",))
        filling.fill_bots(connection, {"free": BOTS})

    pool.database.run(fill)
    pool.change("SELECT intern_instance('team-b')")
    (job,) = pool.submit(instance="team-a", properties=KIND)
    pool.change("UPDATE instances SET pool = 'one' WHERE name = 'team-a'")
    pool.change("UPDATE bots SET instance = (SELECT id FROM instances WHERE name = 'team-b')")
    serves = {"instance": "(SELECT id FROM instances WHERE name = 'team-a')", "pool": "NULL", "all": "NULL"}
    of_pool = "'one'" if request.param == "pool" else "NULL"
    pool.change(f"UPDATE bots SET instance = {serves[request.param]}, pool = {of_pool} WHERE name = 'free-1500'")
    return job


def test_the_few_bots_of_a_tenant_are_found_wherever_a_look_begins(pool: Pool, crowded: str) -> None:
    with pool.database.engine.connect() as connection:
        for seed in range(TRIES):
            chance = random.Random(seed)
            (job,) = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=10, chance=chance)
            want = Wanted(job.cohort, job.instance, job.platform, units=1, count=10)
            (found,) = candidates.sample(connection, [want], chance=chance)
            assert [bot.name for bot in found] == ["free-1500"]
            assert [bot.name for bot in candidates.any_free(connection, want)] == ["free-1500"]
            connection.rollback()


@pytest.mark.parametrize("instances", [None, ["team-a"]])
def test_explain_sees_the_few_bots_of_a_tenant(pool: Pool, crowded: str, instances: list[str] | None) -> None:
    found = explained(pool, crowded, instances=instances)
    assert found.sentence.startswith("nothing stands in its way")
    seen = gates_of(found)["cohort"].evidence
    assert (seen["present"], seen["healthy"]) == ((1, 1) if instances else (1001, 1001))


def test_a_tenant_with_only_full_bots_is_told_of_those(pool: Pool, crowded: str) -> None:
    pool.assigner().run_once()
    (late,) = pool.submit(instance="team-a", properties=KIND)
    assert [
        gate for gate, answer in gates_of(explained(pool, late, instances=["team-a"])).items() if not answer.open
    ] == ["room"]
    with pool.database.engine.connect() as connection:
        assert not ready.pick(connection, Scope(), order=Order.PRIORITY, batch=10, chance=pool.chance)
