"""Demand: what waits, what holds it back, which bots are free for it, and how many are suggested."""

import random
from typing import Any

import httpx
import pytest

from assigner.admission.rules import RULES
from assigner.queries import demand as demand_queries
from assigner.queries.demand import Demand, DemandList, Scale, suggested, unplaced
from tests.support import filling
from tests.support.plans import watching
from tests.support.pool import Pool, completed
from tests.support.tenancy import Tenancy


def read(pool: Pool, scale: Scale = Scale()) -> DemandList:  # noqa: B008
    return pool.database.run(lambda c: demand_queries.demand(c, scale, rules=RULES))


def only(pool: Pool, scale: Scale = Scale()) -> Demand:  # noqa: B008
    (found,) = read(pool, scale).demand
    return found


def counts(found: Demand) -> tuple[int, int, int, int]:
    assert found.queued == found.ready + found.limited + found.retrying
    return found.queued, found.ready, found.limited, found.retrying


def test_jobs_are_counted_by_cohort_and_by_what_they_require(pool: Pool) -> None:
    pool.submit(3, properties={"os": "linux"})
    pool.submit(2, properties={"os": "linux"}, units=4, instance="other")
    pool.submit(1, properties={"os": "linux"}, prefer={"rack": ["7"]})
    pool.submit(1)
    pool.change("UPDATE jobs SET queued_at = now() - interval '90 s' WHERE units = 4")
    linux, plain = read(pool).demand
    assert (linux.cohort, linux.properties, counts(linux)) == ("default", {"os": ["linux"]}, (6, 6, 0, 0))
    assert linux.units == 12
    assert linux.oldest_seconds == pytest.approx(90, abs=30)
    assert (plain.properties, counts(plain)) == ({}, (1, 1, 0, 0))


def test_jobs_that_an_assigner_could_not_start_on_any_bot_are_limited(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("narrow", maximum=5)
    pool.submit(4, instance="narrow", units=2)
    assert counts(only(pool)) == (4, 2, 2, 0)
    pool.submit(3, terms={"locks": ["door"]})
    assert counts(only(pool)) == (7, 3, 4, 0)
    # Another queue that needs the same lock does not count it again.
    pool.submit(3, terms={"locks": ["door"]}, units=3)
    assert counts(only(pool)) == (10, 3, 7, 0)
    pool.change("UPDATE instances SET draining = true WHERE name = 'narrow'")
    assert counts(only(pool)) == (10, 1, 9, 0)


def test_a_job_that_is_to_be_tried_again_waits_and_asks_for_no_bot(pool: Pool) -> None:
    pool.submit(1)
    bot = pool.bot()
    (work,) = pool.given(bot)
    bot.sync(completed(work, "error"))
    found = only(pool, Scale(least=0))
    assert (counts(found), found.suggested_bots) == ((1, 0, 0, 1), 0)


def test_the_bots_that_could_serve_are_counted_with_their_free_units(pool: Pool, tenancy: Tenancy) -> None:
    linux = {"os": "linux"}
    pool.bot("small", capacity=2, properties=linux)
    pool.bot("large", capacity=8, properties=linux)
    pool.bot("other", capacity=8, properties={"os": "plan9"})
    pool.bot("dedicated", capacity=8, properties=linux, instance="elsewhere")
    pool.bot("ill", capacity=8, properties=linux).sync(status="unhealthy")
    pool.submit(1, properties=linux, units=2)
    pool.assigner().run_once()
    pool.submit(20, properties=linux)
    found = only(pool, Scale(units_per_bot=5, most=3))
    assert (found.bots, found.units_in_use, found.free_units) == (2, 2, 8)
    # 8 of the 20 have room, 5 of the 12 others would on a bot of 5 units. Of (2 + 20) / 5 bots the bound allows 3.
    assert (found.would_start_with_one_more_bot, found.suggested_bots) == (5, 3)
    assert only(pool, Scale(units_per_bot=5)).suggested_bots == 5
    assert only(pool).units_per_bot == 8


@pytest.mark.parametrize(
    ("sizes", "in_use", "units_per_bot", "bots"),
    [
        ({}, 0, 4, 0),
        ({}, 1, 4, 1),
        ({1: 8}, 0, 4, 2),
        ({1: 9}, 0, 4, 3),
        ({2: 4}, 0, 5, 2),
        ({3: 4}, 0, 5, 4),
        ({1: 2, 2: 1}, 4, 4, 2),
        ({9: 5}, 0, 4, 0),
        ({1: 10_000}, 0, 1, 100),
    ],
)
def test_the_formula_of_suggested_bots(sizes: dict[int, int], in_use: int, units_per_bot: int, bots: int) -> None:
    assert suggested(sizes, in_use=in_use, units_per_bot=units_per_bot, scale=Scale()) == bots


def test_jobs_fill_free_units_as_they_would_one_bot_after_another(chance: random.Random) -> None:
    for _ in range(300):
        sizes = {chance.randint(1, 6): chance.randint(0, 9) for _ in range(3)}
        bots = [chance.randint(0, 8) for _ in range(chance.randint(0, 5))]
        left, free = dict(sizes), sorted(bots, reverse=True)
        for units in sorted(sizes):
            for bot in sorted(range(len(free)), key=lambda nth: -free[nth]):
                while left[units] and free[bot] >= units:
                    left[units], free[bot] = left[units] - 1, free[bot] - units
        assert unplaced(sizes, {room: bots.count(room) for room in bots}) == left


# The route and the command


@pytest.fixture
def asked(operator: httpx.Client) -> Any:
    def ask(path: str = "", **query: Any) -> Any:
        answer = operator.get(f"/v1/demand{path}", params=query)
        return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["detail"])

    return ask


def test_one_number_for_an_autoscaler_counts_all_that_such_a_bot_could_serve(asked: Any, pool: Pool) -> None:
    pool.submit(2)
    pool.submit(4, properties={"os": "linux"})
    pool.submit(8, properties={"os": "linux", "gpu": "a100"})
    linux = {"properties": ["os=linux"], "units_per_bot": 2}
    assert asked("/value", units_per_bot=2) == {"value": 1}
    assert asked("/value", **linux) == {"value": 3}
    assert asked("/value", **linux, max=2) == {"value": 2}
    assert asked("/value", properties=["os=linux", "gpu=a100"], units_per_bot=2) == {"value": 7}
    # Bots that keep a property for jobs that ask for it serve no others.
    assert asked("/value", properties=["os=linux", "gpu=a100"], exclusive="gpu", units_per_bot=2) == {"value": 4}
    assert asked("/value", properties="os=plan9", units_per_bot=2, min=1) == {"value": 1}
    bot = pool.bot(capacity=4, properties={"os": "linux"})
    assert len(pool.given(bot)) == 4
    # What runs keeps its bots: 4 units in use and the 2 jobs that wait.
    assert asked("/value", **linux) == {"value": 3}


def test_what_is_wrong_is_named(asked: Any) -> None:
    assert asked(min=5, max=2) == (400, "min: 5 is more than max, 2")
    assert asked("/value", cohort="nowhere") == (400, "cohort: there is no cohort 'nowhere'")
    assert asked("/value", properties="os") == (400, "properties: 'os' is not KEY=VALUE")
    refused = "exclusive: 'gpu' is not one of the properties"
    assert asked("/value", properties="os=linux", exclusive="gpu") == (400, refused)
    assert asked(units_per_bot=0)[0] in (400, 422)


# However much waits


def test_what_is_read_grows_with_the_queues_and_not_with_the_jobs(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(connection: Any) -> None:
        filling.fill_queues(connection, instances=2, kinds=("full", "absent"))
        filling.fill_jobs(connection, 4_000, instances=2, kinds=("full", "absent"))
        filling.fill_bots(connection, {"full": 50})

    pool.change("ALTER TABLE jobs SET (autovacuum_enabled = off)")
    pool.database.run(fill)
    exact = read(pool)
    assert [(each.queued, each.at_least) for each in exact.demand] == [(2_000, False)] * 2
    monkeypatch.setattr(demand_queries, "MAX_COUNTED", 400)
    for analysed in (False, True):
        if analysed:
            pool.change("ANALYZE")
        with pool.database.connect() as connection:
            with watching(connection) as watch:
                bounded = demand_queries.demand(connection, Scale(), rules=RULES)
            connection.rollback()
        assert not watch.whole_scans() & {"jobs", "leases"}, str(watch)
        assert watch.touched <= 3 * 400 + 500, str(watch)
        assert [(each.queued, each.at_least) for each in bounded.demand] == [(200, True)] * 2
    monkeypatch.setattr(demand_queries, "MAX_QUEUES", 3)
    assert read(pool).at_least
