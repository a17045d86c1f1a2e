"""Jobs that ask for more than a place: they wait at gates, take of counters while they run, and give back."""

from typing import Any

import pytest

from schema.accounting import counters, quotas, rates
from schema.moves.waiting.priority import set_priority
from schema.picking import constrained
from schema.picking.ready import Scope
from tests.support.explain import closed, explained
from tests.support.pool import Pool, completed
from tests.support.race import Race
from tests.support.tenancy import Tenancy, used


def limit(pool: Pool, name: str, most: float) -> None:
    pool.database.run(lambda c: counters.limit_all(c, {name: most}))


def test_a_lock_is_held_by_one_job_at_a_time_and_keeps_nobody_behind_it_waiting(pool: Pool) -> None:
    first, second = pool.submit(2, terms={"locks": ["tree"]}, priority=-5)
    (free,) = pool.submit(terms={"locks": ["other"]})
    (plain,) = pool.submit()
    bot = pool.bot(capacity=10)
    given = pool.given(bot)
    assert {lease["job"] for lease in given} == {first, free, plain}
    assert used(pool, "lock:default:tree") == 1
    bot.sync(*(completed(lease) for lease in given))
    assert used(pool, "lock:default:tree") == 0
    assert [lease["job"] for lease in pool.given(bot)] == [second]
    pool.restarted(bot)
    assert used(pool, "lock:default:tree") == 0, "it comes back when the bot is gone, too"


def test_explain_names_the_gate_that_is_closed(pool: Pool) -> None:
    pool.submit(terms={"locks": ["tree"]})
    pool.bot(capacity=10)
    pool.assigner().run_once()
    (job,) = pool.submit(terms={"locks": ["tree"]})
    told = explained(pool, job)
    assert closed(told) == ["locks"]
    assert told.sentence == "it does not run because 1 of 1 slots of lock 'tree' are held"
    assert told.change == ["wait until the locks that it names are free"]


def test_explain_asks_nobody_to_wait_for_a_limit_of_0(pool: Pool) -> None:
    limit(pool, "lock:default:tree", 0)
    (job,) = pool.submit(terms={"locks": ["tree"]})
    pool.bot()
    assert explained(pool, job).change == ["raise the limit, which is 0"]


def test_a_job_that_fits_no_bot_now_keeps_nobody_behind_it_waiting(pool: Pool) -> None:
    pool.submit(30, terms={"locks": []}, units=8)
    (small,) = pool.submit(terms={"locks": []})
    bot = pool.bot(capacity=4)
    assigner = pool.assigner()
    for _ in range(3):
        assigner.run_once()
    assert [lease["job"] for lease in bot.take()] == [small]


def test_a_new_priority_is_a_new_place_in_the_line(pool: Pool) -> None:
    first, second = pool.submit(2, terms={"locks": ["tree"]})
    pool.database.run(lambda c: set_priority(c, [second], -5, instances=None, reason=None, actor="test"))
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    assert [lease["job"] for lease in bot.take()] == [second]
    assert first != second


# Jobs that wait at gates beside others that do not: neither keep the others from the bots for as long as they come.


TURNS = 25
#: Turns after which a job that has not started is taken to starve. Chance gives each of them an eighth.
PATIENCE = 8 * TURNS


def order(pool: Pool, *, until: str = "never", turns: int = TURNS) -> str:
    """What a bot of two units runs, in order: G for a constrained job, a point for any other.

    until: stop early once the kinds of jobs so far, sorted, contain this.
    """
    bot, story = pool.bot(capacity=2), ""
    for _ in range(turns):
        if until in "".join(sorted(story)):
            break
        given = pool.given(bot)
        story += "".join("." if not pool.job(lease["job"]).constrained else "G" for lease in given)
        bot.sync(*(completed(lease) for lease in given))
    return story


@pytest.fixture
def staffed(pool: Pool) -> Pool:
    """A pool with an assigner at work, as bots see it."""
    pool.change("INSERT INTO assigners (name) VALUES ('here')")
    return pool


@pytest.mark.parametrize(
    ("crowd", "few", "kind"),
    [
        pytest.param({}, {"terms": {"locks": ["door"]}, "priority": -100}, "G", id="urgent ones at gates"),
        pytest.param({"terms": {"owner": "ann"}, "priority": -100}, {}, ".", id="others behind urgent ones at gates"),
    ],
)
def test_neither_kind_starves_behind_the_other(
    staffed: Pool, crowd: dict[str, Any], few: dict[str, Any], kind: str
) -> None:
    staffed.submit(2 * PATIENCE, **crowd)
    staffed.submit(4, **few)
    assert order(staffed, until=4 * kind, turns=PATIENCE).count(kind) == 4


@pytest.mark.parametrize("urgent", ["constrained", "plain"])
def test_of_both_kinds_the_more_urgent_job_starts_first(pool: Pool, urgent: str) -> None:
    terms = {"locks": ["door"]}
    first, second = (terms, {}) if urgent == "constrained" else ({}, terms)
    (later,) = pool.submit(terms=second)
    (sooner,) = pool.submit(terms=first, priority=-1)
    bot = pool.bot()
    pool.assigner().run_once()
    (work,) = bot.take()
    assert work["job"] == sooner
    pool.change("UPDATE bots SET draining = true")
    bot.sync(completed(work))
    pool.change("UPDATE bots SET draining = false")
    pool.assigner().run_once()
    assert pool.job(later).state == "leased"


def test_what_an_instance_needs_for_its_minimum_comes_first_among_both_kinds(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("acme", minimum=1)
    pool.submit(3, priority=-50)
    (needed,) = pool.submit(instance="acme", terms={"locks": ["door"]}, priority=50)
    bot = pool.bot()
    pool.assigner().run_once()
    assert [work["job"] for work in bot.take()] == [needed]


def test_a_conflict_at_a_limit_delays_no_job_without_constraints(pool: Pool, race: Race) -> None:
    """The charge waits for another transaction that takes the last of the limit, fails, and is tried again."""
    limit(pool, "class:build:jobs", 1)
    pool.submit(terms={"job_class": "build"}, priority=-5)
    (plain,) = pool.submit()
    pool.bot(capacity=4)
    take = "UPDATE counters SET used = used + 1 WHERE name = 'class:build:jobs'"
    race.in_turn(lambda first: first.change(take), pool.assigner().run_once)
    assert race.errors == ["40001"]
    race.forget_errors()
    assert pool.job(plain).state == "leased"
    assert used(pool, "class:build:jobs") == 1
    pool.change("UPDATE counters SET used = 0 WHERE name = 'class:build:jobs'")


def test_an_instance_gets_its_minimum_before_jobs_at_gates_come(staffed: Pool) -> None:
    staffed.submit(2 * TURNS, terms={"owner": "ann"}, priority=-100)
    staffed.submit(TURNS, instance="acme")
    staffed.database.run(
        lambda connection: quotas.set_quota(connection, "default", "acme", minimum=1, maximum=2, actor="test")
    )
    story = order(staffed)
    assert story.count(".") == TURNS, "one of its jobs ran in every turn"
    assert "G" in story


def test_closed_gates_keep_no_bot_from_other_jobs(staffed: Pool) -> None:
    staffed.submit(9, terms={"resource_class": "model"}, priority=-100)
    staffed.database.run(lambda c: rates.advise(c, "model", allowed=False, delay=0.0, actor="test"))
    staffed.submit(TURNS)
    assert order(staffed) == "." * TURNS


def test_where_no_assigner_is_at_work_a_bot_goes_on_with_what_it_can_fetch(pool: Pool) -> None:
    pool.submit(5, terms={"locks": ["door"]}, priority=-100)
    pool.submit(10)
    bot = pool.bot(capacity=1)
    given = pool.given(bot)
    for _ in range(10):
        assert len(given) == 1
        given = bot.sync(*(completed(lease) for lease in given))["leases"]


def test_queues_without_constraints_hide_none_that_have_some(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrained, "MAX_QUEUES", 2)
    pool.submit(terms={"locks": ["tree"]})
    for number in range(5):
        pool.submit(instance=f"team-{number}")
    pool.bot()
    found = pool.database.run(lambda c: constrained.queues(c, Scope(), batch=9, after=constrained.FIRST_QUEUE))
    assert len(found.queues) == 1
