"""Rates of resource classes and models: jobs wait for tokens that all assigners share."""

import random
import re
from bisect import bisect_left
from functools import partial
from typing import Any

import pytest
from leasehold.errors import BadInput, NotFound

from assigner.admission.controller import AdmissionController
from schema.accounting import rates
from tests.support.assigners import assigning
from tests.support.explain import explained
from tests.support.patience import eventually
from tests.support.pool import Pool, completed
from tests.support.race import Race

CLAUDE = {"resource_class": "claude_cli"}
OPUS = {"resource_class": "claude_cli", "model": "opus"}


def rate(pool: Pool, used: str, per_second: float, burst: int) -> None:
    pool.database.run(lambda c: rates.set_rates(c, {used: rates.RateTerms(per_second, burst)}, actor="test"))


def tokens(pool: Pool, used: str) -> float:
    return next(each.tokens for each in pool.database.run(rates.rates) if each.resource == used)


def later(pool: Pool, seconds: float) -> None:
    pool.change("UPDATE rate_buckets SET refilled_at = refilled_at - make_interval(secs => :s)", s=seconds)


def leased(pool: Pool) -> set[str]:
    return {str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE state = 'leased'")}


def test_jobs_of_a_class_start_at_its_rate_and_what_is_left_out_has_none(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.1, burst=3)
    limited = pool.submit(10, terms=CLAUDE)
    (other,) = pool.submit(terms={"resource_class": "codex"}, priority=5)
    (plain,) = pool.submit(priority=5)
    bot = pool.bot(capacity=50)
    given = pool.given(bot)
    assert {work["job"] for work in given} == {*limited[:3], other, plain}
    bot.sync(*map(completed, given))
    pool.assigner().run_once()
    assert tokens(pool, "claude_cli") < 1
    assert leased(pool) == set(), "what was taken does not come back"
    later(pool, 20)
    pool.assigner().run_once()
    assert leased(pool) == set(limited[3:5])


def test_a_model_has_a_rate_of_its_own_and_counts_for_its_class(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.001, burst=4)
    rate(pool, "claude_cli/opus", per_second=0.001, burst=1)
    opus = pool.submit(3, terms=OPUS, priority=-1)
    sonnet = pool.submit(5, terms={"resource_class": "claude_cli", "model": "sonnet"})
    pool.bot(capacity=50)
    pool.assigner().run_once()
    assert leased(pool) == {opus[0], *sonnet[:3]}
    assert tokens(pool, "claude_cli") < 0.1
    assert tokens(pool, "claude_cli/opus") < 0.1


@pytest.mark.parametrize("commit", [True, False])
def test_of_two_assigners_the_second_starts_as_many_jobs_as_there_are_tokens_left(
    pool: Pool, race: Race, commit: bool
) -> None:
    """Both have seen all tokens. The second waits, and then starts the most urgent of its jobs: nothing is undone, and
    no job is put to rest for a token that it lacks."""
    rate(pool, "claude_cli", per_second=0.001, burst=5)
    rate(pool, "claude_cli/opus", per_second=0.001, burst=4)
    for instance in ("one", "two"):
        pool.bot(f"bot-{instance}", instance=instance, capacity=10)
    pool.submit(3, terms=OPUS, instance="one")
    first_to_wait = pool.submit(3, terms=CLAUDE, instance="two", priority=5)
    (urgent,) = pool.submit(terms=OPUS, instance="two", priority=-5)
    (free,) = pool.submit(terms={"locks": ["tree"]}, instance="two", priority=9)
    with race.first() as first:
        first.assigner(instances=("one",)).run_once()
        late = race.second(lambda: pool.assigner(instances=("two",)).run_once(), behind=first)
        first.decide(commit)
        late.result()
    started = {job for job in (*first_to_wait, urgent, free) if pool.job(job).state == "leased"}
    assert started == {urgent, free, *first_to_wait[: 1 if commit else 3]}
    assert [
        row.tokens for row in pool.rows("SELECT floor(tokens)::integer AS tokens FROM rate_buckets ORDER BY name")
    ] == ([0, 0] if commit else [1, 3])
    assert race.errors == []
    assert pool.rows("SELECT FROM queues WHERE looks > 0") == []


def test_an_assigner_that_holds_quotas_does_not_wait_for_a_rate(pool: Pool, race: Race) -> None:
    """To wait out of order could deadlock: what cannot be locked has no token now."""
    rate(pool, "claude_cli", per_second=1, burst=5)
    with race.first() as first:
        first.change("SELECT FROM rate_buckets FOR NO KEY UPDATE")
        look = partial(rates.lock_buckets, wanted=["rate:claude_cli"], missing=[], wait=False)
        assert race.unhindered(lambda: pool.database.run(look), by=first) == {}
    assert pool.database.run(look) == {"rate:claude_cli": 5}


@pytest.mark.conflicts
def test_a_rate_that_is_set_while_an_assigner_chooses_undoes_the_grant(
    pool: Pool, race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assigner has not locked it. It finds too few tokens, begins anew, and keeps the rate."""
    pool.bot(capacity=10)
    pool.submit(3, terms=CLAUDE)
    without_token, tries = AdmissionController.without_token, list[Any]()

    def and_then_an_operator_sets_it(*given: Any, **named: Any) -> set[int]:
        found = without_token(*given, **named)
        if not tries:
            rate(pool, "claude_cli", per_second=0.001, burst=1)
        tries.append(found)
        return found

    monkeypatch.setattr(AdmissionController, "without_token", and_then_an_operator_sets_it)
    pool.assigner().run_once()
    assert (len(pool.rows("SELECT FROM leases")), len(tries)) == (1, 2)
    assert race.errors == ["40001"]


def test_buckets_are_locked_in_the_order_of_their_names(pool: Pool, race: Race) -> None:
    """Who waits for the first of them holds none of the others, in whatever order its jobs come."""
    for used in ("a", "z"):
        rate(pool, used, per_second=1, burst=5)
    with race.first() as first:
        first.database.run(lambda c: rates.draw_tokens(c, {"rate:a": 1}))
        late = race.second(
            lambda: pool.database.run(lambda c: rates.draw_tokens(c, {"rate:z": 1, "rate:a": 1})), behind=first
        )
        assert pool.rows("SELECT name FROM rate_buckets FOR NO KEY UPDATE SKIP LOCKED")[0].name == "rate:z"
        first.commit()
        late.result()
    assert race.errors == []


def test_a_token_is_taken_as_of_the_time_of_its_grant_however_late_its_turn_at_the_bucket_comes(pool: Pool) -> None:
    """Who began first and comes second may not have what has come in since it began: its grant would be one too many
    in the second that ends there."""
    rate(pool, "claude_cli", per_second=10, burst=1)
    pool.change("UPDATE rate_buckets SET refilled_at = clock_timestamp() + interval '90 ms', tokens = 0.99")
    seen = pool.database.run(lambda c: rates.read_buckets(c, ["rate:claude_cli"]))
    assert seen["rate:claude_cli"].tokens < 0.5


def test_the_assigner_comes_back_when_the_next_token_is_due_and_not_for_queues_that_wait_for_more(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=2, burst=1)
    pool.submit(3, terms=CLAUDE)
    pool.bot(capacity=10)
    assigner = pool.assigner(interval=30, jitter=0)
    assigner.run_once()
    assert assigner.run_once() <= 0.6
    pool.submit(2, terms={"locks": ["tree"]}, priority=-5)
    pool.change("UPDATE jobs SET schedule_after = now() + interval '1 hour' WHERE state = 'queued' AND priority = 0")
    later(pool, -3600)
    assigner.run_once()
    pool.submit(2, terms={"locks": ["tree"], **CLAUDE})
    assert assigner.run_once() >= 30, "the lock keeps it closed as well, and nobody knows until when"


def test_thousands_of_limited_jobs_ahead_keep_nobody_behind_them_waiting(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.001, burst=1)
    limited = pool.submit(3_000, terms=CLAUDE, priority=-100)
    behind = pool.submit(20, terms={"locks": ["tree"], "resource_class": "codex"}, priority=100)[:1]
    behind += pool.submit(20, terms={"resource_class": "codex"}, priority=100)
    pool.bot(capacity=50)
    assigner = pool.assigner()
    assigner.run_once()
    assert leased(pool) == {limited[0], *behind}
    assert pool.rows("SELECT id FROM queues WHERE looks > 0") == []
    assert pool.row("SELECT count(*) AS locked FROM jobs WHERE xmax <> 0").locked < 70, "only what may start is locked"


def test_explain_says_which_rate_keeps_a_job_waiting_and_for_how_long(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.1, burst=1)
    _, job = pool.submit(2, terms=CLAUDE)
    pool.bot(capacity=5)
    pool.assigner().run_once()
    told = explained(pool, job)
    assert re.fullmatch(
        r"it does not run because 'claude_cli' may start 0\.1 jobs per second, the next one in (10|9)\.\d\d s",
        told.sentence,
    )
    assert told.change == ["wait until the rates of its resource class and model leave a token"]


def test_operators_set_change_and_remove_rates_and_each_is_audited(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=5, burst=10)
    rate(pool, "claude_cli", per_second=2, burst=4)
    (found,) = pool.database.run(rates.rates)
    assert (found.resource, found.per_second, found.burst, found.tokens) == ("claude_cli", 2, 4, 4)
    pool.database.run(lambda c: rates.remove_rates(c, ["claude_cli"], actor="test", reason="enough"))
    assert pool.database.run(rates.rates) == []
    noted = pool.rows("SELECT action, subject, details FROM audit ORDER BY id")
    assert [(row.action, row.subject) for row in noted] == [
        ("rate.set", "rate:claude_cli"), ("rate.set", "rate:claude_cli"), ("rate.rm", "rate:claude_cli")
    ]  # fmt: skip
    assert noted[1].details["before"] == {"per_second": 5, "burst": 10}
    with pytest.raises(NotFound, match="'claude_cli' has none"):
        pool.database.run(lambda c: rates.remove_rates(c, ["claude_cli"], actor="test"))
    for used in ("Claude", "claude/", "a/b/c"):
        with pytest.raises(BadInput):
            rate(pool, used, 1, 1)
    for per_second, burst in ((0, 1), (float("nan"), 1), (1, 0)):
        with pytest.raises(BadInput):
            rate(pool, "a", per_second, burst)


# One rate, two assigners: never above it by the times of the grants, and hardly below it.


PER_SECOND, BURST = 50, 25
#: Jobs of the limited class, more than can start while the test looks, and of another one.
LIMITED, FREE = 1000, 100
SECONDS = 2.5
#: Part of the rate that has to be used, also on a machine that does much else.
USED = 0.3

GRANTED = """
SELECT extract(epoch FROM l.granted_at)::float AS at FROM leases l JOIN jobs j ON j.id = l.job_id
JOIN queues q ON q.id = j.queue
JOIN constraint_sets g ON g.id = q.constraint_set WHERE g.terms->>'resource_class' = :resource ORDER BY 1"""


def test_a_rate_shared_by_two_assigners_is_kept_in_every_second_and_used(pool: Pool, chance: random.Random) -> None:
    """interval is a second and more: nothing but the bucket itself can bring assigners back in time."""
    rate(pool, "claude_cli", PER_SECOND, BURST)
    for nth in range(20):
        pool.bot(f"bot-{nth}", capacity=500)
    pool.submit(LIMITED, terms=CLAUDE, priority=-10)

    def grants(resource: str) -> list[float]:
        return [row.at for row in pool.rows(GRANTED, resource=resource)]

    with assigning(pool.database, pool.timing, chance, [None, None]):
        eventually(lambda: grants("claude_cli"))
        pool.submit(FREE, terms={"resource_class": "codex"})

        def over() -> bool:
            found = grants("claude_cli")
            return found[-1] - found[0] >= SECONDS and len(grants("codex")) == FREE

        eventually(over, every=0.25)
    found, free = grants("claude_cli"), grants("codex")
    most = max(bisect_left(found, at + 1.0) - nth for nth, at in enumerate(found))
    assert most <= PER_SECOND + BURST
    span = found[-1] - found[0] - 1.0
    used = (len(found) - bisect_left(found, found[0] + 1.0)) / (span * PER_SECOND)
    assert used >= USED
    assert len(found) < LIMITED, "jobs of another class do not wait for this one"
    print(f"{used:.1%} of the rate, at most {most} in a second; {FREE} others in {free[-1] - free[0]:.2f} s")
