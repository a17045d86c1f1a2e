"""Bots that keep properties for jobs that ask for them, and jobs that prefer bots with some properties."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
from leasehold.errors import BadInput
from prometheus_client import REGISTRY
from pydantic import ValidationError

from assigner.placement import sampling
from assigner.placement.fleet import Fleet
from assigner.placement.strategies.first import First
from assigner.placement.strategy import Policy, Snapshot
from bots.agent.agent import AgentSettings
from schema.moves.grant import Placement
from schema.moves.retention import delete_unused_platforms
from schema.moves.waiting.backoff import stop_preferring
from schema.moves.waiting.requeue import requeue
from schema.picking import ready
from schema.picking.pick import Order
from schema.picking.ready import Scope
from schema.postgres.connection import Connection
from tests.support import filling
from tests.support.explain import explained, gates_of
from tests.support.pool import Pool, active, completed, graph_of, snapshot, taken
from tests.support.pool import bot as free_bot
from tests.support.pool import job as picked
from tests.support.race import Race, cancel, outcome, retention
from tests.support.tenancy import Tenancy

SSD: dict[str, Any] = {"preferred_properties": {"disk": ["ssd"]}}
STRATEGIES = ("capacity", "locality", "success")


def homes(pool: Pool) -> dict[str, tuple[str, str | None]]:
    """Job → (bot, phase), for all leases in the order of the grants."""
    rows = pool.rows(
        "SELECT j.public_id, b.name, e.details->>'phase' AS phase FROM leases l JOIN jobs j ON j.id = l.job_id"
        " JOIN bots b ON b.id = l.bot_id"
        " JOIN job_events e ON e.job_id = j.id AND e.fence = l.fence AND e.move = 'grant' ORDER BY e.id"
    )
    return {str(row.public_id): (row.name, row.phase) for row in rows}


def counted(phase: str) -> float:
    return REGISTRY.get_sample_value("leasehold_jobs_preferring_total", {"phase": phase}) or 0.0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_preferred_bot_is_taken_although_another_one_scores_more(pool: Pool, strategy: str) -> None:
    pool.bot("large", capacity=50, priority=-1)
    pool.bot("ssd", capacity=2, properties={"disk": "ssd"})
    jobs = pool.submit(3, **SSD)
    misses = counted("required")
    pool.assigner(strategy={"kind": strategy}).run_once()
    assert homes(pool) == {
        jobs[0]: ("ssd", "preferred"),
        jobs[1]: ("ssd", "preferred"),
        jobs[2]: ("large", "required"),
    }
    assert counted("required") == misses + 1


@pytest.mark.parametrize("sampling", [True, False])
def test_jobs_keep_their_order_across_both_phases(pool: Pool, tenancy: Tenancy, *, sampling: bool) -> None:
    """A more urgent job that prefers nothing gets the bot that a less urgent one prefers. A maximum holds in both."""
    tenancy.quota("default", maximum=3)
    pool.bot("ssd", capacity=2, properties={"disk": "ssd"})
    (urgent,) = pool.submit(priority=-5, units=2)
    wishing, _ = pool.submit(2, **SSD)
    for name in ("other", "another"):
        pool.bot(name, capacity=1)
    assigner = pool.assigner(strategy={"sampling": {"enabled": sampling}})
    assigner.run_once()
    assigner.run_once()
    found = homes(pool)
    assert found.pop(urgent) == ("ssd", None)
    assert {job: phase for job, (_, phase) in found.items()} == {wishing: "required"}


def test_what_is_required_is_required_in_both_phases(pool: Pool) -> None:
    pool.bot("ssd", capacity=9, properties={"disk": "ssd"})
    pool.bot("linux", capacity=1, properties={"os": "linux"})
    first, second = pool.submit(2, properties={"os": "linux"}, **SSD)
    pool.assigner().run_once()
    assert homes(pool) == {first: ("linux", "required")}
    pool.bot("both", properties={"os": "linux", "disk": "ssd"})
    pool.assigner().run_once()
    assert homes(pool)[second] == ("both", "preferred")


def test_a_preferred_bot_that_somebody_has_locked_is_not_waited_for(pool: Pool, race: Race) -> None:
    pool.bot("ssd", properties={"disk": "ssd"})
    pool.bot("other")
    (job,) = pool.submit(**SSD)
    with race.first() as other:
        other.connection.execute_sql("SELECT FROM bots WHERE name = 'ssd' FOR UPDATE")
        race.unhindered(pool.assigner().run_once, by=other)
    assert homes(pool) == {job: ("other", "required")}


def test_jobs_that_take_resources_prefer_bots_too(pool: Pool) -> None:
    pool.bot("large", capacity=50, resources={"cpu_milli": 9000})
    pool.bot("ssd", capacity=50, resources={"cpu_milli": 1000}, properties={"disk": "ssd"})
    jobs = pool.submit(2, terms={"resources": {"cpu_milli": 600}}, **SSD)
    pool.assigner().run_once()
    assert homes(pool) == {jobs[0]: ("ssd", "preferred"), jobs[1]: ("large", "required")}


def test_a_preferred_property_opens_a_bot_that_keeps_it_for_such_jobs(pool: Pool) -> None:
    pool.bot("gpu", capacity=9, properties={"gpu": "a100"}, exclusive=["gpu"])
    (plain,), (wishing,) = pool.submit(), pool.submit(preferred_properties={"gpu": ["a100"]})
    pool.assigner().run_once()
    assert homes(pool) == {wishing: ("gpu", "preferred")}
    assert pool.job(plain).state == "queued"


def test_a_bot_fetches_jobs_that_prefer_it_and_leaves_the_others_to_assigners(pool: Pool) -> None:
    pool.submit(2)
    ssd = pool.bot("ssd", properties={"disk": "ssd"})
    other = pool.bot("other")
    pool.assigner().run_once()
    (mine,), (others,) = ssd.take(), other.take()
    first, second = pool.submit(2, **SSD)
    assert other.sync(completed(others))["leases"] == []
    (work,) = ssd.sync(completed(mine))["leases"]
    assert work["job"] == first
    assert homes(pool)[first] == ("ssd", "preferred")
    ssd.sync(active(work))
    pool.assigner().run_once()
    assert homes(pool)[second] == ("other", "required")


def test_a_job_may_wait_for_a_preferred_bot_before_it_takes_another(pool: Pool) -> None:
    pool.bot("other", capacity=9)
    patient, job = pool.submit(2, prefer_seconds=60.0, **SSD)
    assigner = pool.assigner()
    assigner.run_once()
    assert homes(pool) == {}
    answer = gates_of(explained(pool, job))["requirements"]
    assert answer.open is False
    assert "it insists on what it prefers for another" in answer.sentence

    pool.change(
        "UPDATE preference_waits SET until = now(), seconds = 0.001"
        " WHERE job_id = (SELECT id FROM jobs WHERE public_id = CAST(:id AS uuid))",
        id=job,
    )
    assigner.run_once()
    assert homes(pool) == {job: ("other", "required")}
    pool.bot("ssd", properties={"disk": "ssd"})
    assigner.run_once()
    assert homes(pool)[patient] == ("ssd", "preferred")


def test_a_wait_for_a_preferred_bot_begins_when_the_job_is_queued(pool: Pool) -> None:
    """A node of a graph waits while it is blocked; then it insists for all of its seconds."""
    request = graph_of({1: [], 2: [1]})
    request["nodes"][1] |= {**SSD, "prefer_seconds": 3600.0}
    graph = taken(pool, request)
    bot = pool.bot("other", capacity=9)
    assigner = pool.assigner()
    pool.change("UPDATE preference_waits SET until = now()")
    assigner.run_once()
    assert pool.row("SELECT until > now() + interval '59 min' AS later FROM preference_waits").later
    (work,) = bot.take()
    bot.sync(completed(work))
    pool.change("UPDATE preference_waits SET until = now()")
    assigner.run_once()
    assert pool.job(graph.jobs[2]).state == "queued"
    assert list(homes(pool)) == [graph.jobs[1]]
    late = "SELECT abs(extract(epoch FROM w.until - j.queued_at) - 3600) < 1 AS exact FROM preference_waits w"
    assert pool.row(f"{late} JOIN jobs j ON j.id = w.job_id").exact


def test_a_wait_goes_when_its_job_has_ended_or_is_deleted(pool: Pool) -> None:
    bot = pool.bot("ssd", properties={"disk": "ssd"})
    pool.submit(prefer_seconds=60.0, **SSD)
    (work,) = pool.given(bot)
    bot.sync(completed(work))
    pool.change("UPDATE preference_waits SET until = now()")
    cancel(pool, *pool.submit(prefer_seconds=3600.0, **SSD))
    pool.assigner().run_once()
    assert pool.row("SELECT until > now() AS later FROM preference_waits").later
    assert retention(pool) == 2
    assert pool.rows("SELECT FROM preference_waits") == []


def test_a_job_that_somebody_has_locked_stops_to_insist_later(pool: Pool, race: Race) -> None:
    pool.bot("other")
    (job,) = pool.submit(prefer_seconds=0.001, **SSD)
    assigner = pool.assigner()
    with race.first() as other:
        other.connection.execute_sql("SELECT FROM jobs FOR UPDATE")
        race.unhindered(assigner.run_once, by=other)
    assert homes(pool) == {}
    assigner.run_once()
    assert homes(pool) == {job: ("other", "required")}


def test_a_job_that_is_submitted_again_prefers_and_waits_as_before(pool: Pool, tenancy: Tenancy) -> None:
    request = {"properties": {"os": "linux"}, "prefer_seconds": 0.001, **SSD}
    bot = pool.bot("linux", properties={"os": "linux"})
    (job,) = pool.submit(max_attempts=1, **request)
    (work,) = pool.given(bot)
    bot.sync(completed(work, "failed"))
    assert pool.job(job).state == "failed"
    (again,) = pool.database.run(
        lambda c: requeue(c, [job], instances=None, ceiling=None, key=None, reason=None, actor="test")
    )
    row = pool.row(
        "SELECT r.properties AS required, f.properties AS preferred, w.seconds"
        " FROM jobs j JOIN queues q ON q.id = j.queue"
        " JOIN platforms r ON r.id = q.required JOIN platforms f ON f.id = j.preferred"
        " JOIN preference_waits w ON w.job_id = j.id WHERE j.public_id = CAST(:id AS uuid)",
        id=again.successor,
    )
    assert tuple(row) == ({"os": ["linux"]}, {"os": ["linux"], "disk": ["ssd"]}, 0.001)


def test_a_job_takes_nothing_of_a_preferred_bot_that_it_did_not_get(pool: Pool) -> None:
    """A bot on probation runs one job at a time, which only a grant checks."""
    ssd = pool.bot("ssd", capacity=9, resources={"gpus": 2}, properties={"disk": "ssd"})
    other = pool.bot("other", capacity=9, resources={"gpus": 4})
    pool.change("UPDATE bots SET probation_until = now() + interval '1 hour' WHERE name = 'ssd'")
    jobs = pool.submit(2, terms={"resources": {"gpus": 1}}, **SSD)
    pool.assigner().run_once()
    assert homes(pool) == {jobs[0]: ("ssd", "preferred"), jobs[1]: ("other", "required")}
    assert [lease["gpus"] for bot in (ssd, other) for lease in bot.sync()["leases"]] == [[0], [0]]
    used = pool.rows("SELECT name, used FROM counters WHERE name LIKE 'bot\\:%\\:gpus' ORDER BY name")
    assert [row.used for row in used] == [1, 1]


def test_jobs_that_alternate_between_preferring_something_and_nothing_are_chosen_for_together() -> None:
    class CountedFirst(First):
        calls = 0

        def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:
            self.calls += 1
            return super().choose(snapshot, policy, how=how)

    jobs = [picked(nth, kind=nth % 2)._replace(preferred=9 if nth % 2 else None) for nth in range(200)]
    preferred = free_bot(1, 20)
    seen = snapshot(jobs, [preferred, free_bot(2, 170, priority=1)], preferred={1: [preferred]})
    strategy = CountedFirst()
    placements = seen.chosen_by(strategy, Policy(), how={})
    assert strategy.calls <= 2, "one for each group that prefers something, and one"
    assert [each.job_id for each in placements] == list(range(190)), "in their order, and no more than there is room"
    assert [each.bot_id for each in placements] == [1] * 20 + [2] * 170
    assert {each.decision.get("phase") for each in placements[1:20:2]} == {"preferred"}
    assert {each.decision.get("phase") for each in placements[21::2]} == {"required"}
    assert not any("phase" in each.decision for each in placements[::2])


def test_no_preferred_bot_is_hidden_because_the_same_jobs_could_go_elsewhere(pool: Pool) -> None:
    """Jobs are shown bots that jobs before them are likely to leave free. These are the same jobs."""
    pool.submit(200, preferred_properties={"kind": ["fine"]})
    pool.database.run(lambda c: filling.fill_bots(c, {"fine": 200, "coarse": 600}))
    with pool.database.connect() as connection:
        jobs = ready.pick(connection, ready.Scope(), order=ready.Order.PRIORITY, batch=200)
        for seed in range(5):
            chance = random.Random(seed)
            seen = sampling.sample_snapshot(connection, jobs, sample_size=10, fleet=Fleet(), chance=chance)
            assert len(seen.preferred[0]) == 200


@pytest.mark.conflicts
def test_a_preference_whose_requirement_set_upkeep_has_just_deleted_is_stored_anew(pool: Pool, race: Race) -> None:
    cancel(pool, *pool.submit(**SSD))
    retention(pool)
    pool.change("DELETE FROM queues")

    def clean(connection: Connection) -> int:
        return delete_unused_platforms(connection, age=0, limit=100)

    assert pool.database.run(clean) == 1, "the other one is named by it"
    race.in_turn(lambda ahead: clean(ahead.connection), lambda: pool.submit(**SSD))
    assert race.errors == ["40001"]
    race.forget_errors()
    row = pool.row("SELECT p.properties FROM jobs j JOIN platforms p ON p.id = j.preferred")
    assert row.properties == SSD["preferred_properties"]


def test_jobs_that_stop_to_insist_while_others_make_their_queues_do_not_deadlock(pool: Pool, race: Race) -> None:
    """Queues are made in the same order by all."""
    jobs = [pool.submit(units=units, prefer_seconds=0.001, **SSD)[0] for units in (2, 1)]
    with race.first() as ahead:
        ahead.submit(units=1, **SSD)
        late = race.second(lambda: pool.database.run(lambda c: stop_preferring(c, 100)), behind=ahead)
        ahead.submit(units=2, **SSD)
        ahead.commit()
        assert outcome(late).jobs == 2
    assert [pool.queue_of(job).required for job in jobs] == [None, None]


def test_what_is_null_or_required_too_is_no_preference(pool: Pool) -> None:
    """In the nested form, which SQL takes as it is, alone and together with others."""
    (alike,) = pool.submit(properties={"os": "linux"}, preferred_properties={"os": ["linux"]}, prefer_seconds=60.0)
    (alone,) = pool.submit(preferred_properties=None)
    together = pool.submit(2, preferred_properties=None, prefer_seconds=5.0)
    assert [pool.job(job).preferred for job in (alike, alone, *together)] == [None] * 4
    assert pool.rows("SELECT FROM preference_waits") == []


# Bots that keep properties for jobs that ask for them.


GPU: dict[str, Any] = {"properties": {"os": "linux", "gpu": ["a100", "any"]}, "exclusive": ["gpu"]}


def bots_of(pool: Pool) -> dict[str, str]:
    """Job → bot."""
    return {job: bot for job, (bot, _) in homes(pool).items()}


@pytest.mark.parametrize("sampling", [True, False])
def test_only_jobs_that_ask_for_each_exclusive_property_go_to_its_bot(pool: Pool, *, sampling: bool) -> None:
    """Whether the bot was there before the jobs or not."""
    pool.bot("both", capacity=9, properties={"gpu": "b200", "licence": "x"}, exclusive=["licence", "gpu"])
    (plain,), (linux,) = pool.submit(), pool.submit(properties={"os": "linux"})
    asking = [*pool.submit(properties={"gpu": "any"}), *pool.submit(properties={"os": "linux", "gpu": "a100"})]
    pool.submit(properties={"gpu": "b200"})
    (licensed,) = pool.submit(properties={"gpu": "b200", "licence": "x"})
    pool.bot("gpu-1", capacity=9, **GPU)
    assigner = pool.assigner(strategy={"sampling": {"enabled": sampling}})
    assigner.run_once()
    found = {**dict.fromkeys(asking, "gpu-1"), licensed: "both"}
    assert bots_of(pool) == found

    pool.bot("cpu-1", capacity=9, properties={"os": "linux"})
    assigner.run_once()
    assert bots_of(pool) == {**found, plain: "cpu-1", linux: "cpu-1"}


def test_a_bot_fetches_no_job_that_does_not_ask_for_its_exclusive_property(pool: Pool) -> None:
    pool.submit(properties={"gpu": "any"})
    bot = pool.bot("gpu-1", **GPU)
    (work,) = pool.given(bot)
    pool.submit()
    assert bot.sync(completed(work))["leases"] == []
    (asking,) = pool.submit(properties={"gpu": "any"})
    assert [work["job"] for work in pool.given(bot)] == [asking]


def test_a_bot_may_give_its_property_free_with_a_new_session(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot("gpu-1", **GPU)
    assert pool.given(bot) == []
    bot = pool.bot("gpu-1", properties=GPU["properties"])
    assert [work["job"] for work in pool.given(bot)] == [job]


@pytest.mark.parametrize("many_kinds", [1000, 1], ids=["few kinds", "many kinds"])
def test_however_many_kinds_of_bots_there_are_some_keep_their_properties(pool: Pool, many_kinds: int) -> None:
    names = [f"cpu-{number}" for number in range(3)]
    for name in names:
        pool.bot(name, properties={"os": "linux", "disk": name})
    pool.bot("gpu-1", **GPU)
    pool.submit(properties={"os": "linux"})
    with pool.database.connect() as connection:
        jobs = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=1)
        fleet = Fleet(many_kinds=many_kinds)
        seen = sampling.sample_snapshot(connection, jobs, sample_size=9, fleet=fleet, chance=pool.chance)
    assert sorted(bot.name for bot in seen.candidates[0]) == names


def test_explain_tells_which_property_keeps_a_job_from_its_only_bot(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "linux"})
    pool.bot("gpu-1", **GPU)
    verdict = gates_of(explained(pool, job))["requirements"]
    assert not verdict.open
    assert "1 bot offering it is kept for jobs that ask for gpu" in verdict.sentence
    assert verdict.evidence["exclusive"] == ["gpu"]


def test_an_exclusive_property_that_the_bot_does_not_offer_is_refused(pool: Pool) -> None:
    with pytest.raises(BadInput, match="exclusive: 'gpu' is not one of the bot's properties"):
        pool.bot(properties={"os": "linux"}, exclusive=["gpu"])
    assert pool.rows("SELECT FROM bots") == []
    with pytest.raises(ValidationError, match="'gpu' is not one of the bot's properties"):
        AgentSettings(properties={"os": "linux"}, exclusive=("gpu",))
