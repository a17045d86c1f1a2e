"""Cohorts, quotas and instances, set by an operator while the pool runs."""

import pytest
from leasehold.errors import BadInput, Conflict

from schema.postgres.connection import Connection
from schema.tenancy import cohorts, instances
from schema.tenancy.cohorts import CohortSettings
from tests.support.http import audited
from tests.support.plans import watching
from tests.support.pool import Pool, completed
from tests.support.race import Race
from tests.support.tenancy import Tenancy, cohort_of, put_cohort, remove_cohort


def place(pool: Pool, name: str, of: str | None) -> None:
    pool.database.run(lambda c: instances.put_instance(c, name, pool=of, actor="test"))


def test_bots_and_queued_jobs_move_to_the_first_cohort_with_all_their_labels(pool: Pool) -> None:
    pool.bot(labels=["gpu"])
    pool.submit(label="gpu")
    put_cohort(pool, "wide", "cpu", "gpu")
    assert (cohort_of(pool, "bots"), cohort_of(pool, "jobs")) == ("wide", "wide")
    put_cohort(pool, "narrow", "gpu", position=0)
    assert (cohort_of(pool, "bots"), cohort_of(pool, "jobs")) == ("narrow", "narrow")
    remove_cohort(pool, "narrow")
    assert (cohort_of(pool, "bots"), cohort_of(pool, "jobs")) == ("wide", "wide")


def test_a_job_that_runs_keeps_its_cohort_until_it_is_queued_again(pool: Pool) -> None:
    _, bot, work = pool.running(label="gpu")
    put_cohort(pool, "gpus", "gpu")
    assert cohort_of(pool, "jobs") == "default"
    bot.sync(completed(work, "released"))
    assert cohort_of(pool, "jobs") == "gpus"


def test_a_submit_undecided_while_a_cohort_is_declared_gets_it_too(pool: Pool, race: Race) -> None:
    race.in_turn(
        lambda first: first.submit(label="gpu", properties={"os": "new"}), lambda: put_cohort(pool, "gpus", "gpu")
    )
    assert cohort_of(pool, "jobs") == "gpus"


def test_a_submit_behind_a_cohort_that_is_being_declared_waits_and_gets_it(pool: Pool, race: Race) -> None:
    race.in_turn(
        lambda first: put_cohort(first, "gpus", "gpu"), lambda: pool.submit(label="gpu", properties={"os": "new"})
    )
    assert cohort_of(pool, "jobs") == "gpus"


def test_a_cohort_in_use_is_not_removed_and_the_default_never(pool: Pool) -> None:
    put_cohort(pool, "gpus", "gpu")
    Tenancy(pool).quota("team-a", maximum=1, cohort="gpus")
    with pytest.raises(Conflict, match="still has quotas"):
        remove_cohort(pool, "gpus")
    with pytest.raises(BadInput, match="default cohort"):
        remove_cohort(pool, "default")
    with pytest.raises(BadInput, match="at most 1000"):
        put_cohort(pool, "many", *[str(n) for n in range(1001)])


def test_a_declared_list_is_the_order_and_leaves_the_others_alone(pool: Pool) -> None:
    put_cohort(pool, "other", "x")
    wanted = [CohortSettings(name="b", labels=("1",)), CohortSettings(name="a", labels=("1", "2"))]
    for _ in range(2):
        pool.database.run(lambda c: cohorts.declare(c, wanted, actor="config"))
    names = [each.name for each in pool.database.run(cohorts.cohorts)]
    assert names.index("b") < names.index("a")
    assert sorted(names) == ["a", "b", "default", "other"]
    assert names[-1] == "default"
    assert audited(pool.database) == ["cohort.set"] * 3


def test_a_maximum_below_the_usage_stops_nothing_and_starts_nothing(pool: Pool) -> None:
    tenancy = Tenancy(pool)
    tenancy.quota("team-a", maximum=3)
    pool.submit(5, instance="team-a")
    bot = pool.bot(capacity=10)
    works = pool.given(bot)
    tenancy.quota("team-a", maximum=1)
    pool.assigner().run_once()
    assert (len(works), tenancy.usage("team-a")) == (3, 3)
    bot.sync(*[completed(work) for work in works])
    pool.assigner().run_once()
    assert tenancy.usage("team-a") == 1


def test_a_pool_is_not_changed_under_the_bots_that_serve_it(pool: Pool) -> None:
    place(pool, "team-a", "builds")
    pool.submit(instance="team-a")
    bot = pool.bot(pool="builds")
    (work,) = pool.given(bot)
    with pytest.raises(Conflict, match="drain it first"):
        place(pool, "team-a", None)
    bot.sync(completed(work))
    place(pool, "team-a", None)
    (found,) = [each for each in pool.database.run(instances.instances) if each.name == "team-a"]
    assert (found.pool, found.running) == (None, 0)


def test_a_bot_of_a_pool_serves_all_its_instances_and_no_other(pool: Pool) -> None:
    for name, of in (("team-a", "builds"), ("team-b", "builds"), ("team-c", "tests")):
        place(pool, name, of)
        pool.submit(instance=name)
    pool.submit(instance="team-d")
    bot = pool.bot(pool="builds", capacity=10)
    pool.assigner().run_once()
    assert len(bot.take()) == 2
    assert Tenancy(pool).running() == {"team-a": 1, "team-b": 1}


def test_an_assigner_of_one_instance_serves_its_whole_pool_and_no_other(pool: Pool) -> None:
    for name, of in (("team-a", "builds"), ("team-b", "builds"), ("team-c", "tests"), ("team-d", None)):
        place(pool, name, of)
        pool.submit(instance=name)
    pool.bot(capacity=10)
    pool.assigner(instances=["team-a"]).run_once()
    assert Tenancy(pool).running() == {"team-a": 1, "team-b": 1}
    pool.assigner(instances=["team-d"]).run_once()
    assert Tenancy(pool).running() == {"team-a": 1, "team-b": 1, "team-d": 1}


def test_an_instance_that_changes_its_pool_is_served_by_the_new_one_alone(pool: Pool) -> None:
    place(pool, "team-a", "builds")
    place(pool, "team-a", "tests")
    pool.submit(instance="team-a")
    pool.bot("old", pool="builds")
    pool.assigner().run_once()
    assert Tenancy(pool).running() == {}
    pool.bot("new", pool="tests")
    pool.assigner().run_once()
    assert pool.row("SELECT b.name FROM live l JOIN bots b ON b.id = l.bot_id").name == "new"


def test_a_change_of_cohorts_reads_only_the_waiting_jobs_that_move(pool: Pool) -> None:
    pool.submit(300, label="cpu")
    pool.submit(300)
    pool.submit(3, label="gpu")
    pool.change("ANALYZE jobs")

    def read(name: str, *labels: str) -> float:
        def work(connection: Connection) -> float:
            with watching(connection) as watch:
                cohorts.put_cohort(connection, name, labels=labels, actor="test")
            assert "jobs" not in watch.whole_scans()
            on_jobs = [node for plan in watch.plans for node in plan.nodes if node.relation == "jobs" and node.loops]
            return sum(node.touched for node in on_jobs)

        return pool.database.run(work)

    assert read("gpus", "gpu") < 20
    assert read("gpus", "gpu", "tpu") < 20
    assert read("others", "gpu", "tpu", "npu") == 0
    assert {row.name for row in pool.rows("SELECT c.name FROM jobs j JOIN cohorts c ON c.id = j.cohort")} == {
        "gpus",
        "default",
    }


def test_cohorts_declared_in_another_order_move_what_then_belongs_elsewhere(pool: Pool) -> None:
    pool.bot(labels=["gpu", "big"])
    pool.submit(label="gpu")
    one = CohortSettings(name="one", labels=("gpu", "big"))
    two = CohortSettings(name="two", labels=("gpu", "big", "more"))
    for order, owner in (([one, two], "one"), ([two, one], "two"), ([one, two], "one")):
        pool.database.run(lambda c, wanted=order: cohorts.declare(c, wanted, actor="config"))
        assert (cohort_of(pool, "bots"), cohort_of(pool, "jobs")) == (owner, owner)
