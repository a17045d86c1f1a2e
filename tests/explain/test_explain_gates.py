"""Why a job does not run for its own sake: prepared situations, the gate that is closed, and what would help."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from assigner.admission.ordering import OrderingSettings
from assigner.admission.rules import Rules
from schema.tenancy import drains
from tests.support.explain import closed, cohort, explained, gates_of, keep, park, rest, status
from tests.support.pool import Pool, submitted, work_off
from tests.support.race import cancel
from tests.support.tenancy import Tenancy


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


def sick(pool: Pool) -> None:
    """Three bots that offer linux and take no work."""
    pool.bot("other")
    for name, how in (("bot-1", {"status": "unhealthy"}), ("bot-2", {"draining": True}), ("bot-3", {"closing": True})):
        pool.bot(name, properties={"os": "linux"})
        status(pool, name, **how)


def drained(pool: Pool) -> None:
    pool.bot()
    pool.database.run(lambda c: drains.drain_instance(c, "team-a", draining=True, actor="operator:o"))


LONG_AGO = "INSERT INTO ticks VALUES ('reaper', now() - interval '5 min', now())"
TEAM_A: dict[str, Any] = {"instance": "team-a"}
#: A job, what happens, the closed gates, the changes that would help, and a part of the sentence or what the gate saw.
Situation = tuple[dict[str, Any], Callable[[Pool, str], object], list[str], list[str], str | dict[str, Any]]
SITUATIONS: dict[str, Situation] = {
    "it is held aside": (
        {}, lambda pool, job: (pool.bot(), park(pool, job, "disk is full")), ["state"], ["release it"],
        "it is parked (held: disk is full)",
    ),
    "its instance is drained": (
        TEAM_A, lambda pool, _: drained(pool), ["drain"], ["end the drain of instance 'team-a'"],
        "instance 'team-a' is drained: it starts nothing",
    ),
    "there is no bot": (
        {"units": 2}, lambda _, __: None, ["cohort"], ["a bot with 2 units"],
        {"label": "", "cohort": "default", "present": 0, "healthy": 0},
    ),
    "upkeep has not been seen, and no assigner": (
        {}, lambda pool, _: (pool.bot(), pool.change(LONG_AGO)), ["assigners"], ["start an assigner"], {},
    ),
    "several gates are closed": (
        {**TEAM_A, "properties": {"gpu": "a100"}},
        lambda pool, job: (Tenancy(pool).quota("team-a", maximum=0), pool.bot(), park(pool, job)),
        ["state", "quota", "requirements"],
        ["release it", "raise the maximum of team-a in cohort default from 0 to 1", "a bot with gpu=a100"], {},
    ),
    "bots that match take no work": (
        {"properties": {"os": "linux"}}, lambda pool, _: sick(pool), ["healthy"],
        ["end the drain of a matching bot, or start another"],
        {"healthy": 0, "draining": 2, "unhealthy": 1, "not_synced": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_closed_gates_and_what_would_help(pool: Pool, situation: str) -> None:
    fields, happens, gates, changes, seen = SITUATIONS[situation]
    (job,) = pool.submit(**fields)
    happens(pool, job)
    found = explained(pool, job)
    assert (closed(found), found.change) == (gates, changes)
    if isinstance(seen, str):
        assert seen in found.sentence
    elif seen:
        assert gates_of(found)[gates[-1]].evidence == seen


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
    rest(pool, job, -1)
    found = explained(pool, job)
    assert (closed(found), found.change) == ([], [])
    assert gates_of(found)["backoff"].sentence == "its rest after 2 looks without a place is over"


def test_a_job_that_no_bot_can_run_says_so_first_and_then_when_it_is_looked_at_again(pool: Pool) -> None:
    (job,) = pool.submit(properties={"gpu": "a100"})
    pool.bot()
    rest(pool, job, 100, looks=9, reason="no healthy bot offers what it requires")
    found = explained(pool, job)
    assert closed(found) == ["backoff", "requirements"]
    cause = gates_of(found)["requirements"].sentence
    assert found.sentence.startswith(f"it does not run because {cause}; it is looked at again in 1 min 4")
    assert found.change == ["a bot with gpu=a100"], "the bot that comes wakes the queue"


def test_a_retry_that_rests_is_not_laid_at_the_door_of_busy_bots(pool: Pool) -> None:
    job, _ = pool.submit(2)
    pool.bot(capacity=1)
    rest(pool, job, 30, looks=0, reason="exit 3")
    pool.assigner().run_once()
    pool.change("UPDATE jobs SET attempts = 1 WHERE state = 'queued'")
    found = explained(pool, job)
    assert closed(found) == ["backoff", "room"]
    assert found.sentence.startswith("it does not run because it rests for another ")
    gate = gates_of(found)["backoff"]
    assert "after 1 attempt: exit 3" in gate.sentence
    assert 0 < gate.evidence["rest_seconds"] <= 30
    assert found.change[0] == f"wait {gate.evidence['rest_seconds']:.1f} s"
    pool.change("UPDATE jobs SET attempts = 0 WHERE state = 'queued'")


def test_a_job_whose_instance_a_bot_is_being_freed_for_waits_for_that_bot(pool: Pool) -> None:
    pool.submit(instance="team-b")
    pool.given(pool.bot("bot-1", capacity=1))
    (job,) = pool.submit(instance="team-a")
    (other,) = pool.submit(instance="team-c")
    keep(pool, "bot-1", "team-a", seconds=20)
    found = explained(pool, job)
    assert closed(found) == ["room"]
    gate = gates_of(found)["room"]
    assert gate.evidence["kept_units"] == 1
    assert 15 < gate.evidence["kept_seconds"] <= 20
    (change,) = found.change
    assert change == f"wait at most {gate.evidence['kept_seconds']:.1f} s for what is being freed for its instance"
    found = explained(pool, other)
    assert (closed(found), found.change) == (["room"], ["1 more free unit on a matching bot"])
    said = "the only bot that could run it has no free unit; 1 unit kept for other instances"
    assert gates_of(found)["room"].sentence == said


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
    tenancy.quota("team-a", minimum=1, maximum=2)
    found = explained(pool, job)
    assert gates_of(found)["quota"].evidence["headroom"] == -2, "lowered below the usage"
    assert found.change == ["raise the maximum of team-a in cohort default from 2 to 5"]


def test_a_quota_that_evictions_have_lowered_says_so(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("team-a", maximum=5)
    pool.submit(3, instance="team-a")
    pool.bot(capacity=9)
    pool.assigner().run_once()
    tenancy.evicted("team-a")
    tenancy.evicted("team-a")
    (job,) = pool.submit(instance="team-a")
    gate = gates_of(explained(pool, job))["quota"]
    assert "uses 3 of 5 (nobody else waits, so the 2 lately evicted take nothing off it), this job" in gate.sentence
    pool.submit(instance="team-b")
    found = explained(pool, job)
    gate = gates_of(found)["quota"]
    assert (
        "uses 3 of 3 (its maximum 5 less 2 lately evicted, while others wait), this job needs 1: 3 + 1 > 3"
        in gate.sentence
    )
    assert (gate.evidence["effective_max"], gate.evidence["evicted_lately"]) == (3, 2)
    assert found.change == ["raise the maximum of team-a in cohort default from 5 to 6"]


def test_an_instance_without_a_quota_or_without_a_maximum_may_have_any_number(pool: Pool, tenancy: Tenancy) -> None:
    (job,) = pool.submit(instance="team-a")
    gate = gates_of(explained(pool, job))["quota"]
    assert (gate.open, gate.sentence) == (True, "'team-a' in cohort 'default' has no quota: any number of units")
    tenancy.quota("team-a", minimum=2)
    gate = gates_of(explained(pool, job))["quota"]
    assert (gate.open, gate.sentence) == (True, "'team-a' in cohort 'default' uses 0 units and has no maximum")


def test_assigners_that_all_stopped_place_nothing(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    assert "assigners" not in gates_of(explained(pool, job)), "there is nothing to judge by"
    pool.database.run(lambda c: drains.record_assigner_alive(c, "one", starts=True))
    assert gates_of(explained(pool, job))["assigners"].open
    pool.database.run(lambda c: drains.drain_assigner(c, "one", draining=True, actor="operator:o"))
    found = explained(pool, job)
    assert (closed(found), found.change) == (["assigners"], ["end the drain of an assigner, or start one"])
    pool.database.run(lambda c: drains.drain_assigner(c, "one", draining=False, actor="operator:o"))
    pool.database.run(lambda c: drains.record_assigner_stopped(c, "one"))
    assert explained(pool, job).change == ["start an assigner"]


def test_a_job_that_no_assigner_serves_is_not_about_to_run(pool: Pool) -> None:
    cohort(pool, "linux", "linux")
    job, labelled = pool.submit(instance="team-a")[0], pool.submit(instance="team-a", label="linux")[0]
    pool.submit(instance="team-b")
    pool.bot()
    pool.bot("penguin", labels=["linux"])

    def serve(*entries: dict[str, list[str] | None]) -> None:
        pool.database.run(lambda c: drains.record_assigner_alive(c, "one", serves=entries))

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


# Why a job does not run for want of a bot: prepared situations, the gate that is closed, and what would help.


def test_a_label_parts_a_job_from_the_bots_of_other_cohorts(pool: Pool) -> None:
    cohort(pool, "linux", "gpu", "cpu")
    (job,) = pool.submit(label="gpu")
    pool.bot(capacity=4)
    found = explained(pool, job)
    assert (found.cohort, closed(found)) == ("linux", ["cohort"])
    said = "its label 'gpu' belongs to cohort 'linux', which has no bot"
    assert gates_of(found)["cohort"].sentence == said
    assert found.change == ["a bot in cohort 'linux'"]
    (other,) = pool.submit(label="nightly")
    gate = gates_of(explained(pool, other))["cohort"]
    said = "no cohort has its label 'nightly', so it belongs to cohort 'default', with 1 of 1 bot healthy"
    assert (gate.open, gate.sentence) == (True, said)
    pool.bot("bot-2", labels=["gpu"])
    assert closed(explained(pool, job)) == []


def test_the_clause_that_leaves_the_fewest_bots_is_named(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "linux", "gpu": "a100"})
    (large,) = pool.submit(properties={"os": "linux", "gpu": "a100"}, units=3)
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
        "no bot of cohort 'default' offers gpu=a100, os=linux; no bot offers gpu=a100, and 3 bots offer all the rest"
    )
    assert found.change == ["a bot with gpu=a100 and os=linux"]
    pool.bot("bot-4", properties={"gpu": "a100"})
    found = explained(pool, large)
    assert gates_of(found)["requirements"].evidence["scarcest"] == "gpu=a100", "no bot has both"
    assert found.change == ["a bot with gpu=a100, os=linux and 3 units"]


def test_bots_for_other_instances_and_pools_do_not_serve(pool: Pool) -> None:
    (job,) = pool.submit(instance="team-a", properties={"os": "linux"})
    pool.bot("bot-1", properties={"os": "linux"}, instance="team-b")
    pool.bot("bot-2", properties={"os": "linux"}, pool="builders")
    found = explained(pool, job)
    assert closed(found) == ["instance"]
    assert gates_of(found)["instance"].evidence == {"instance": "team-a", "pool": None, "serving": 0, "elsewhere": 2}
    assert found.change == ["a bot with os=linux that serves instance 'team-a'"]
    pool.change("UPDATE instances SET pool = 'builders'")
    assert closed(explained(pool, job)) == []


def test_a_job_larger_than_every_bot_or_than_the_room_of_each_names_the_largest(pool: Pool) -> None:
    (job,) = pool.submit(units=4)
    pool.bot("bot-1", capacity=2)
    pool.bot("bot-2", capacity=3)
    found = explained(pool, job)
    assert closed(found) == ["units"]
    assert gates_of(found)["units"].evidence == {"units": 4, "large_enough": 0, "largest": 3}
    assert found.change == ["a matching bot with 4 units; the largest has 3"]
    _, waiting = pool.submit(2, units=3)
    pool.assigner().run_once()
    found = explained(pool, waiting)
    assert closed(found) == ["room"]
    said = "the only bot that could run it has no free unit, and it takes 3"
    assert gates_of(found)["room"].sentence == said
    assert found.change == ["3 more free units on a matching bot"]


def test_a_job_that_finds_too_little_room_is_told_how_much_the_bot_has_that_has_most(pool: Pool) -> None:
    pool.submit(units=1)
    pool.bot("bot-1", capacity=3)
    pool.assigner().run_once()
    (waiting,) = pool.submit(units=3)

    def said() -> str:
        return gates_of(explained(pool, waiting))["room"].sentence

    assert said() == "the only bot that could run it has 2 free units, and it takes 3"
    pool.bot("bot-2", capacity=3)
    pool.submit(2, units=2, priority=-1)
    pool.assigner().run_once()
    assert said() == "none of the 2 bots that could run it has more than 1 free unit, and it takes 3"
    pool.submit(2, units=1, priority=-1)
    pool.assigner().run_once()
    assert said() == "none of the 2 bots that could run it has a free unit, and it takes 3"


# What `explain` and `show` say of a job that waits for other jobs.


def test_a_blocked_job_names_the_nodes_it_waits_for_and_what_would_start_it(pool: Pool) -> None:
    graph = submitted(pool, {1: [], 2: [], 3: [1, 2], 4: [3], 5: [], 6: [], 7: [], 8: [], 9: [1, 2, *range(4, 9)]})
    (single,) = pool.submit()
    pool.bot()
    found = explained(pool, graph.jobs[3])
    assert closed(found) == ["dependencies", "state"]
    assert found.sentence == (
        "it does not run because node 3 of graph 'build' waits for 2 nodes: node 1 is queued, node 2 is queued"
    )
    assert found.change == ["wait for 2 of the nodes that it depends on"]
    evidence = gates_of(found)["dependencies"].evidence
    assert (evidence["node"], evidence["waits_for"], evidence["blocked_forever"]) == (3, 2, False)
    assert [parent["job"] for parent in evidence["parents"]] == [graph.jobs[1], graph.jobs[2]]
    assert explained(pool, graph.jobs[9]).sentence.endswith("node 6 is queued, and 2 more"), "of many the first few"
    first = gates_of(explained(pool, graph.jobs[1]))["dependencies"]
    assert first.sentence == "node 1 of graph 'build' waits for no other node"
    assert "dependencies" not in gates_of(explained(pool, single))


@pytest.mark.parametrize("how", ["absent", "failed", "cancelled"])
def test_what_can_never_run_is_blocked_for_ever_and_so_is_what_depends_on_it(pool: Pool, how: str) -> None:
    graph = submitted(pool, {1: [], 2: [1, 9] if how == "absent" else [1], 3: [{"node": 2, "on_failure": "run"}]})
    if how == "cancelled":
        cancel(pool, graph.jobs[1])
    else:
        work_off(pool, pool.bot(), graph, {1: "failed" if how == "failed" else "succeeded"})
    why = "no node has the number 9" if how == "absent" else f"node 1 is {how}"
    assert explained(pool, graph.jobs[2]).sentence == (
        f"it does not run because BLOCKED_FOREVER: node 2 of graph 'build' waits for 1 node: {why}; it can never run"
    )
    below = explained(pool, graph.jobs[3])
    assert below.sentence.endswith("waits for 1 node: node 2 is blocked; it can never run, because of node 2")
    assert below.change[0] == "nothing will: cancel it, or submit its graph again"
    row = pool.row("SELECT state, blocked, blocked_forever FROM graph_stats")
    assert tuple(row) == ("stalled", 2, 2)


def test_show_tells_the_node_and_why_it_waits(pool: Pool, operator: httpx.Client) -> None:
    graph = submitted(pool, {1: [], 2: [1]})
    shown = operator.get(f"/v1/jobs/{graph.jobs[2]}").json()
    assert shown["graph"] == {"id": graph.public_id, "name": "build", "node": 2, "depth": 1}
    assert shown["waiting"]["sentence"] == explained(pool, graph.jobs[2]).sentence


def test_an_order_that_chooses_among_the_first_jobs_of_a_queue_is_named(pool: Pool) -> None:
    _, job = pool.submit(2, terms={"owner": "ann"})
    pool.bot()

    assert "chooses" not in explained(pool, job).sentence
    for settings, name in (
        (OrderingSettings(kind="score"), "score"),
        (OrderingSettings(shortest_first=True), "shortest_first"),
    ):
        told = explained(pool, job, rules=Rules(settings)).sentence
        said = f"by priority and age; the order {name} chooses among at most the first 1,000 jobs of a queue"
        assert told.endswith(said)
