"""Rates of resource classes and models: jobs wait for tokens that all assigners share."""

import re

import pytest

from assigner.explain import explain
from schema import rates
from schema.errors import BadInput, NotFound
from schema.requests import JobRequest
from tests.pool import Pool, completed
from tests.racing import Race

CLAUDE = {"resource_class": "claude_cli"}
OPUS = {"resource_class": "claude_cli", "model": "opus"}


def rate(pool: Pool, used: str, per_second: float, burst: int) -> None:
    pool.database.run(lambda c: rates.set_rate(c, used, per_second=per_second, burst=burst, actor="test"))


def tokens(pool: Pool, used: str) -> float:
    return next(each.tokens for each in pool.database.run(rates.rates) if each.resource == used)


def later(pool: Pool, seconds: float) -> None:
    pool.change("UPDATE rate_buckets SET refilled_at = refilled_at - make_interval(secs => :s)", s=seconds)


def leased(pool: Pool) -> set[str]:
    return {str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE state = 'leased'")}


def test_ma_20_jobs_of_a_class_start_at_its_rate_and_what_is_left_out_has_none(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.1, burst=3)
    limited = pool.submit(10, terms=CLAUDE)
    (other,) = pool.submit(terms={"resource_class": "codex"}, priority=5)
    (plain,) = pool.submit(priority=5)
    pool.bot(capacity=50)
    pool.assigner().run_once()
    assert leased(pool) == {*limited[:3], other, plain}
    pool.assigner().run_once()
    assert tokens(pool, "claude_cli") < 1
    later(pool, 20)
    pool.assigner().run_once()
    assert leased(pool) == {*limited[:5], other, plain}


def test_ma_20_a_model_has_a_rate_of_its_own_and_counts_for_its_class(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.001, burst=4)
    rate(pool, "claude_cli/opus", per_second=0.001, burst=1)
    opus = pool.submit(3, terms=OPUS, priority=-1)
    sonnet = pool.submit(5, terms={"resource_class": "claude_cli", "model": "sonnet"})
    pool.bot(capacity=50)
    pool.assigner().run_once()
    assert leased(pool) == {opus[0], *sonnet[:3]}
    assert tokens(pool, "claude_cli") < 0.1
    assert tokens(pool, "claude_cli/opus") < 0.1


@pytest.mark.conflicts
def test_ma_23_a_token_that_is_gone_since_it_was_seen_undoes_the_grant(pool: Pool, race: Race) -> None:
    """The look and the token are one transaction: who loses the race for the last one begins anew and waits."""
    rate(pool, "claude_cli", per_second=0.001, burst=1)
    for instance in ("one", "two"):
        pool.bot(f"bot-{instance}", instance=instance)
        pool.submit(terms=CLAUDE, instance=instance)
    with race.first() as first:
        first.assigner(instances=("one",)).run_once()
        late = race.second(lambda: pool.assigner(instances=("two",)).run_once(), behind=first)
        first.commit()
        late.result()
    assert len(pool.rows("SELECT 1 FROM leases")) == 1
    assert "40001" in race.errors


def test_ma_24_buckets_are_locked_in_the_order_of_their_names(pool: Pool, race: Race) -> None:
    """Who waits for the first of them holds none of the others, in whatever order its jobs come."""
    for used in ("a", "z"):
        rate(pool, used, per_second=1, burst=5)
    with race.first() as first:
        first.database.run(lambda c: rates.draw(c, {"rate:a": 1}))
        late = race.second(lambda: pool.database.run(lambda c: rates.draw(c, {"rate:z": 1, "rate:a": 1})), behind=first)
        assert pool.rows("SELECT name FROM rate_buckets FOR NO KEY UPDATE SKIP LOCKED")[0].name == "rate:z"
        first.commit()
        late.result()
    assert race.errors == []


def test_a_token_is_taken_as_of_the_time_of_its_grant_however_late_its_turn_at_the_bucket_comes(pool: Pool) -> None:
    """Who began first and comes second may not have what has come in since it began: its grant would be one too many
    in the second that ends there."""
    rate(pool, "claude_cli", per_second=10, burst=1)
    pool.change("UPDATE rate_buckets SET refilled_at = clock_timestamp() + interval '90 ms', tokens = 0.99")
    seen = pool.database.run(lambda c: rates.read(c, ["rate:claude_cli"]))
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


def test_ten_thousand_limited_jobs_ahead_keep_nobody_behind_them_waiting(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.001, burst=1)
    limited = pool.submit(10_000, terms=CLAUDE, priority=-100)
    behind = pool.submit(20, terms={"locks": ["tree"], "resource_class": "codex"}, priority=100)[:1]
    behind += pool.submit(20, terms={"resource_class": "codex"}, priority=100)
    pool.bot(capacity=50)
    assigner = pool.assigner()
    assigner.run_once()
    assert leased(pool) == {limited[0], *behind}
    assert pool.rows("SELECT id FROM jobs WHERE considered > 0 OR schedule_after IS NOT NULL") == []
    assert pool.row("SELECT count(*) AS locked FROM jobs WHERE xmax <> 0").locked < 70, "only what may start is locked"


def test_explain_says_which_rate_keeps_a_job_waiting_and_for_how_long(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.1, burst=1)
    _, job = pool.submit(2, terms=CLAUDE)
    pool.bot(capacity=5)
    pool.assigner().run_once()
    told = pool.database.run(lambda c: explain(c, job, instances=None, cooldown=600))
    assert told is not None
    assert re.fullmatch(
        r"it does not run because 'claude_cli' may start 0\.1 jobs per second, the next one in (10|9)\.\d\d s",
        told.sentence,
    )
    assert told.change == ["wait until the rates of what it uses leave a token"]


def test_a_rate_outlives_restarts_of_bots_and_what_was_taken_does_not_come_back(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.001, burst=2)
    pool.submit(3, terms=CLAUDE)
    bot = pool.bot(capacity=10)
    pool.assigner().run_once()
    leases = bot.take()
    assert len(leases) == 2
    bot.sync(*(completed(lease) for lease in leases))
    pool.assigner().run_once()
    assert bot.take() == []


def test_operators_set_change_and_remove_rates_and_each_is_audited(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=5, burst=10)
    rate(pool, "claude_cli", per_second=2, burst=4)
    (found,) = pool.database.run(rates.rates)
    assert (found.resource, found.per_second, found.burst, found.tokens) == ("claude_cli", 2, 4, 4)
    pool.database.run(lambda c: rates.remove_rate(c, "claude_cli", actor="test", reason="enough"))
    assert pool.database.run(rates.rates) == []
    noted = pool.rows("SELECT action, subject, details FROM audit ORDER BY id")
    assert [(row.action, row.subject) for row in noted] == [
        ("rate.set", "rate:claude_cli"), ("rate.set", "rate:claude_cli"), ("rate.rm", "rate:claude_cli")
    ]  # fmt: skip
    assert noted[1].details["before"] == {"per_second": 5, "burst": 10}
    with pytest.raises(NotFound, match="'claude_cli' has none"):
        pool.database.run(lambda c: rates.remove_rate(c, "claude_cli", actor="test"))


@pytest.mark.parametrize(
    ("used", "per_second", "burst"),
    [("Claude", 1, 1), ("claude/", 1, 1), ("a/b/c", 1, 1), ("a", 0, 1), ("a", float("nan"), 1), ("a", 1, 0)],
)
def test_what_is_no_rate_is_refused(pool: Pool, used: str, per_second: float, burst: int) -> None:
    with pytest.raises(BadInput):
        rate(pool, used, per_second, burst)


def test_ma_02_a_request_may_name_what_it_uses_and_how_urgent_its_graph_is() -> None:
    asked = JobRequest(command=["true"], resource_class="claude_cli", model="opus", graph_priority=3)
    assert asked.normal()["terms"] == {"resource_class": "claude_cli", "model": "opus", "graph_priority": 3}
    assert "terms" not in JobRequest(command=["true"]).normal()
    with pytest.raises(BadInput, match="model: needs a resource_class"):
        JobRequest(command=["true"], model="opus").normal()
    with pytest.raises(ValueError, match="resource_class"):
        JobRequest(command=["true"], resource_class="Claude")
