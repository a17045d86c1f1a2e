"""Why a job does not run for want of a bot: prepared situations, the gate that is closed, and what would help."""

from tests.explaining import closed, cohort, explained, gates_of, status
from tests.pool import Pool


def test_a_pool_without_bots_has_no_healthy_bot_in_the_cohort(pool: Pool) -> None:
    (job,) = pool.submit(units=2)
    found = explained(pool, job)
    assert (closed(found), found.change) == (["cohort"], ["a bot with 2 units"])
    assert gates_of(found)["requirements"].open is None
    assert gates_of(found)["cohort"].evidence == {"label": "", "cohort": "default", "present": 0, "healthy": 0}


def test_a_label_parts_a_job_from_the_bots_of_other_cohorts(pool: Pool) -> None:
    cohort(pool, "linux", "gpu", "cpu")
    (job,) = pool.submit(label="gpu")
    pool.bot(capacity=4)
    found = explained(pool, job)
    assert (found.cohort, closed(found)) == ("linux", ["cohort"])
    gate = gates_of(found)["cohort"]
    assert gate.sentence == "its label 'gpu' belongs to cohort 'linux', with 0 of 0 bots healthy"
    assert found.change == ["a bot in cohort 'linux'"]
    pool.bot("bot-2", labels=["gpu"])
    assert closed(explained(pool, job)) == []


def test_a_label_that_no_cohort_has_belongs_to_the_default(pool: Pool) -> None:
    cohort(pool, "linux", "gpu")
    (job,) = pool.submit(label="nightly")
    pool.bot()
    gate = gates_of(explained(pool, job))["cohort"]
    assert gate.open
    assert (
        gate.sentence == "no cohort has its label 'nightly', so it belongs to cohort 'default', with 1 of 1 bot healthy"
    )


def test_the_clause_that_leaves_the_fewest_bots_is_named(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "linux", "gpu": "a100"})
    for n in range(3):
        pool.bot(f"bot-{n}", properties={"os": "linux"})
    pool.bot("bot-3", properties={"os": "mac"})
    found = explained(pool, job)
    assert closed(found) == ["requirements"]
    gate = gates_of(found)["requirements"]
    assert gate.evidence["clauses"] == [
        {"clause": "gpu=a100", "bots": 0, "bots_with_all_others": 3},
        {"clause": "os=linux", "bots": 3, "bots_with_all_others": 0},
    ]
    assert gate.evidence["scarcest"] == "gpu=a100"
    assert gate.sentence == (
        "no bot of cohort 'default' offers gpu=a100, os=linux; gpu=a100 leaves the fewest: 0 bots with it, "
        "3 with all the rest"
    )
    assert found.change == ["a bot with gpu=a100 and os=linux"]


def test_properties_that_no_bot_has_together_are_told_apart(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "linux", "gpu": "a100"}, units=3)
    pool.bot("bot-1", properties={"os": "linux"})
    pool.bot("bot-2", properties={"os": "linux"})
    pool.bot("bot-3", properties={"gpu": "a100"})
    found = explained(pool, job)
    assert gates_of(found)["requirements"].evidence["scarcest"] == "gpu=a100"
    assert found.change == ["a bot with gpu=a100, os=linux and 3 units"]


def test_bots_for_other_instances_do_not_serve(pool: Pool) -> None:
    (job,) = pool.submit(instance="team-a", properties={"os": "linux"})
    pool.bot("bot-1", properties={"os": "linux"}, instance="team-b")
    pool.bot("bot-2", properties={"os": "linux"}, pool="others")
    found = explained(pool, job)
    assert closed(found) == ["instance"]
    assert gates_of(found)["instance"].evidence == {"instance": "team-a", "pool": None, "serving": 0, "elsewhere": 2}
    assert found.change == ["a bot with os=linux that serves instance 'team-a'"]


def test_a_bot_of_the_pool_of_its_instance_serves(pool: Pool) -> None:
    (job,) = pool.submit(instance="team-a")
    pool.bot("bot-1", pool="builders")
    assert closed(explained(pool, job)) == ["instance"]
    pool.change("UPDATE instances SET pool = 'builders'")
    assert closed(explained(pool, job)) == []


def test_matching_bots_that_take_no_work_are_counted_by_why(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "linux"})
    for name in ("bot-1", "bot-2", "bot-3"):
        pool.bot(name, properties={"os": "linux"})
    pool.bot("bot-4")
    status(pool, "bot-1", status="unhealthy")
    status(pool, "bot-2", draining=True)
    status(pool, "bot-3", closing=True)
    found = explained(pool, job)
    assert closed(found) == ["healthy"]
    assert gates_of(found)["healthy"].evidence == {"healthy": 0, "draining": 2, "unhealthy": 1}
    assert found.change == ["end the drain of a matching bot, or start another"]


def test_a_job_larger_than_every_matching_bot_names_the_largest(pool: Pool) -> None:
    (job,) = pool.submit(units=4)
    pool.bot("bot-1", capacity=2)
    pool.bot("bot-2", capacity=3)
    found = explained(pool, job)
    assert closed(found) == ["units"]
    assert gates_of(found)["units"].evidence == {"units": 4, "large_enough": 0, "largest": 3}
    assert found.change == ["a matching bot with 4 units; the largest has 3"]


def test_full_bots_tell_how_many_units_are_missing(pool: Pool) -> None:
    pool.submit(units=3)
    pool.bot("bot-1", capacity=4)
    pool.assigner().run_once()
    (job,) = pool.submit(units=3)
    found = explained(pool, job)
    assert closed(found) == ["room"]
    gate = gates_of(found)["room"]
    assert gate.sentence == "none of 1 bot has 3 free units: the most is 1"
    assert found.change == ["2 more free units on a matching bot"]
