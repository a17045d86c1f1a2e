"""Why a job does not run for its own sake: prepared situations, the gate that is closed, and what would help."""

from schema import drains
from tests.explaining import closed, cohort, explained, gates_of, park, reserve, rest
from tests.pool import Pool
from tests.tenancy import Tenancy


def test_nothing_stands_in_the_way_of_a_job_with_a_free_bot(pool: Pool) -> None:
    _, job = pool.submit(2)
    pool.bot("bot-1", capacity=3)
    found = explained(pool, job)
    assert (closed(found), found.change) == ([], [])
    assert found.sentence == (
        "nothing stands in its way: 1 bot with room, and 1 job before it in its queue, 1 job in its instance and cohort"
    )
    assert gates_of(found)["room"].evidence == {
        "free_bots": 1, "units": 1, "most_free_units": 3, "bots": ["bot-1"],
    }  # fmt: skip


def test_a_job_held_aside_waits_for_its_release(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    park(pool, job, "disk is full")
    found = explained(pool, job)
    assert found.state == "parked"
    assert (closed(found), found.change) == (["state"], ["release it"])
    assert gates_of(found)["state"].sentence == "it is parked (held: disk is full)"


def test_a_job_in_backoff_tells_how_long_and_why(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    rest(pool, job, 30, looks=2, reason="no healthy bot offers what it requires")
    found = explained(pool, job)
    assert closed(found) == ["backoff"]
    gate = gates_of(found)["backoff"]
    assert 25 < gate.evidence["rest_seconds"] <= 30
    assert gate.evidence["considered"] == 2
    assert gate.sentence.endswith("s after 2 looks without a place: no healthy bot offers what it requires")
    assert found.change == [f"wait {gate.evidence['rest_seconds']:.1f} s"]


def test_a_job_whose_backoff_is_over_has_nothing_closed(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    rest(pool, job, -1)
    found = explained(pool, job)
    assert (closed(found), found.change) == ([], [])
    assert gates_of(found)["backoff"].sentence == "its rest after 2 looks without a place is over"


def test_a_retry_rests_after_its_attempt(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    rest(pool, job, 9, looks=0, reason="exit 3")
    pool.change("UPDATE jobs SET attempts = 1")
    assert "after 1 attempt: exit 3" in gates_of(explained(pool, job))["backoff"].sentence
    pool.change("UPDATE jobs SET attempts = 0")


def test_a_job_that_a_bot_is_being_freed_for_waits_for_that_bot(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot("bot-1", capacity=1)
    reserve(pool, job, "bot-1", seconds=20)
    found = explained(pool, job)
    assert closed(found) == ["backoff", "reservation", "room"]
    gate = gates_of(found)["reservation"]
    assert (gate.evidence["bot"], gate.evidence["units"]) == ("bot-1", 1)
    assert 15 < gate.evidence["left_seconds"] <= 20
    (change,) = found.change
    left = f"{gate.evidence['left_seconds']:.1f} s"
    assert change == f"wait at most {left} for the bot that is being freed for it"


def test_a_drained_instance_starts_nothing(pool: Pool) -> None:
    (job,) = pool.submit(instance="team-a")
    pool.bot()
    pool.database.run(lambda c: drains.drain_instance(c, "team-a", draining=True, actor="operator:o"))
    found = explained(pool, job)
    assert (closed(found), found.change) == (["drain"], ["end the drain of instance 'team-a'"])
    assert found.sentence == "it does not run because instance 'team-a' is drained: it starts nothing"


def test_a_quota_that_is_used_up_shows_the_sum(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=1, maximum=4)
    *_, job = pool.submit(5, instance="team-a")
    pool.bot(capacity=9)
    for _ in range(2):
        pool.assigner().run_once()
    found = explained(pool, job)
    assert closed(found) == ["quota"]
    gate = gates_of(found)["quota"]
    assert gate.sentence == "'team-a' in cohort 'default' uses 4 of 4, this job needs 1: 4 + 1 > 4"
    assert gate.evidence == {
        "usage": 4, "min_quota": 1, "max_quota": 4, "effective_max": 4, "headroom": 0, "units": 1, "evicted_lately": 0,
    }  # fmt: skip
    assert found.change == ["raise the maximum of team-a in cohort default from 4 to 5"]


def test_a_quota_that_evictions_have_lowered_says_so(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=5)
    pool.submit(3, instance="team-a")
    pool.bot(capacity=9)
    pool.assigner().run_once()
    tenancy.evicted("team-a")
    tenancy.evicted("team-a")
    (job,) = pool.submit(instance="team-a")
    found = explained(pool, job)
    gate = gates_of(found)["quota"]
    assert "uses 3 of 3 (its maximum 5 less 2 lately evicted), this job needs 1: 3 + 1 > 3" in gate.sentence
    assert (gate.evidence["effective_max"], gate.evidence["evicted_lately"]) == (3, 2)
    assert found.change == ["raise the maximum of team-a in cohort default from 5 to 6"]


def test_a_maximum_lowered_below_the_usage_starts_nothing_new(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=5)
    pool.submit(3, instance="team-a")
    pool.bot(capacity=9)
    pool.assigner().run_once()
    tenancy.quota("team-a", maximum=1)
    (job,) = pool.submit(instance="team-a", units=2)
    found = explained(pool, job)
    assert gates_of(found)["quota"].evidence["headroom"] == -2
    assert found.change == ["raise the maximum of team-a in cohort default from 1 to 5"]


def test_an_instance_without_a_quota_may_have_any_number(pool: Pool) -> None:
    (job,) = pool.submit(instance="team-a")
    gate = gates_of(explained(pool, job))["quota"]
    assert gate.open
    assert gate.sentence == "'team-a' in cohort 'default' has no quota: any number of units"


def test_a_quota_without_a_maximum_is_open(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", minimum=2)
    (job,) = pool.submit(instance="team-a")
    gate = gates_of(explained(pool, job))["quota"]
    assert gate.open
    assert gate.sentence == "'team-a' in cohort 'default' uses 0 units and has no maximum"


def test_several_closed_gates_take_several_changes(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=0)
    (job,) = pool.submit(instance="team-a", properties={"gpu": "a100"})
    pool.bot()
    park(pool, job)
    found = explained(pool, job)
    assert closed(found) == ["state", "quota", "requirements"]
    assert found.change == [
        "release it",
        "raise the maximum of team-a in cohort default from 0 to 1",
        "a bot with gpu=a100",
    ]


def test_assigners_that_all_stopped_place_nothing(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    assert "assigners" not in gates_of(explained(pool, job)), "there is nothing to judge by"
    pool.database.run(lambda c: drains.assigner_seen(c, "one", starts=True))
    assert gates_of(explained(pool, job))["assigners"].open
    pool.database.run(lambda c: drains.drain_assigner(c, "one", draining=True, actor="operator:o"))
    found = explained(pool, job)
    assert (closed(found), found.change) == (["assigners"], ["end the drain of an assigner, or start one"])
    pool.database.run(lambda c: drains.drain_assigner(c, "one", draining=False, actor="operator:o"))
    pool.database.run(lambda c: drains.assigner_stopped(c, "one"))
    assert explained(pool, job).change == ["start an assigner"]


def test_a_job_that_no_assigner_serves_is_not_about_to_run(pool: Pool) -> None:
    cohort(pool, "linux", "linux")
    job, labelled = pool.submit(instance="team-a")[0], pool.submit(instance="team-a", label="linux")[0]
    pool.submit(instance="team-b")
    pool.bot()
    pool.bot("penguin", labels=["linux"])

    def serve(*entries: dict[str, list[str] | None]) -> None:
        pool.database.run(lambda c: drains.assigner_seen(c, "one", serves=entries))

    serve({"instances": ["team-b"], "cohorts": None}, {"instances": None, "cohorts": ["linux"]})
    assert explained(pool, labelled).change == []
    found = explained(pool, job)
    assert closed(found) == ["assigners"]
    assert found.sentence == (
        "it does not run because 0 assigners at work for instance 'team-a' in cohort 'default', 1 only for others"
    )
    assert found.change == ["an assigner that serves instance 'team-a' in cohort 'default'"]
    pool.change("UPDATE instances SET pool = 'both'")
    assert closed(explained(pool, job)) == [], "assigners take the others of their pools too"
    serve({"instances": ["team-b"], "cohorts": ["linux"]}, {"instances": ["team-a"], "cohorts": ["default"]})
    assert closed(explained(pool, job)) == []


def test_without_a_table_of_assigners_the_age_of_upkeep_tells(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    pool.change("INSERT INTO ticks VALUES ('reaper', now() - interval '5 min', now())")
    found = explained(pool, job)
    assert (closed(found), found.change) == (["assigners"], ["start an assigner"])
    assert gates_of(found)["assigners"].evidence["upkeep_seconds_ago"] >= 300


def test_a_queue_timeout_is_told_and_closes_nothing(pool: Pool) -> None:
    (job,) = pool.submit(queue_timeout_seconds=50)
    pool.bot()
    found = explained(pool, job)
    assert closed(found) == []
    assert 40 < gates_of(found)["queue deadline"].evidence["left_seconds"] <= 50


def test_the_place_in_the_order_counts_what_is_more_urgent_or_older(pool: Pool) -> None:
    pool.submit(2, priority=-1)
    pool.submit(1, properties={"os": "linux"})
    (job,) = pool.submit(properties={})
    pool.submit(4)
    pool.submit(3, instance="team-b", priority=-5)
    found = explained(pool, job)
    assert found.order is not None
    assert (found.order.in_queue.jobs, found.order.in_queue.more) == (2, False)
    assert (found.order.in_instance.jobs, found.order.in_instance.more) == (3, False)
