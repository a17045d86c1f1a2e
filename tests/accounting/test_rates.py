"""Rates of resource classes and models: jobs wait for tokens that all assigners share."""

import random
import re
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from leasehold.errors import BadInput, NotFound
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from assigner.admission import rules
from assigner.admission.checkers import CheckerSettings
from assigner.admission.rules import Rules
from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.explain.answer import explain
from schema.accounting import counters, rates
from schema.moves.hold import unpark
from schema.requests import JobRequest
from tests.support.assigners import assigner_processes
from tests.support.patience import eventually
from tests.support.plans import statements
from tests.support.pool import Pool, completed
from tests.support.race import Race

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


def test_jobs_of_a_class_start_at_its_rate_and_what_is_left_out_has_none(pool: Pool) -> None:
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
        look = partial(rates.lock_buckets, wanted=["rate:claude_cli"], wait=False)
        assert race.unhindered(lambda: pool.database.run(look), by=first) == {}
    assert pool.database.run(look)["rate:claude_cli"].tokens == 5


@pytest.mark.conflicts
def test_a_rate_that_is_set_while_an_assigner_chooses_undoes_the_grant(
    pool: Pool, race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assigner has not locked it. It finds too few tokens, begins anew, and keeps the rate."""
    pool.bot(capacity=10)
    pool.submit(3, terms=CLAUDE)
    assigner, tries = pool.assigner(), list[Any]()
    without_token = assigner._admission.without_token

    def and_then_an_operator_sets_it(*given: Any, **named: Any) -> set[int]:
        found = without_token(*given, **named)
        if not tries:
            rate(pool, "claude_cli", per_second=0.001, burst=1)
        tries.append(found)
        return found

    monkeypatch.setattr(assigner._admission, "without_token", and_then_an_operator_sets_it)
    assigner.run_once()
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


def test_ten_thousand_limited_jobs_ahead_keep_nobody_behind_them_waiting(pool: Pool) -> None:
    rate(pool, "claude_cli", per_second=0.001, burst=1)
    limited = pool.submit(10_000, terms=CLAUDE, priority=-100)
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
    told = pool.database.run(lambda c: explain(c, job, instances=None))
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
    leases = pool.given(bot)
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


def test_a_request_may_name_what_it_uses_and_how_urgent_its_graph_is() -> None:
    asked = JobRequest(command=["true"], resource_class="claude_cli", model="opus", graph_priority=3)
    assert asked.normal()["terms"] == {"resource_class": "claude_cli", "model": "opus", "graph_priority": 3}
    assert "terms" not in JobRequest(command=["true"]).normal()
    with pytest.raises(BadInput, match="model: needs a resource_class"):
        JobRequest(command=["true"], model="opus").normal()
    with pytest.raises(ValueError, match="resource_class"):
        JobRequest(command=["true"], resource_class="Claude")


# Advice to hold back, of operators and of checkers, and checks of rates that fail.

CODEX = {"resource_class": "codex", "model": "large"}


class Limits:
    """A checker that answers what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[], bool]] = {}
        self.asked: list[tuple[str, str | None]] = []

    def is_rate_limited(self, resource_class: str, model: str | None) -> bool:
        self.asked.append((resource_class, model))
        return self.answers.get(resource_class, lambda: False)()


class Pressure:
    def __init__(self, allowed: bool = True, delay: float = 0.0, error: Exception | None = None) -> None:
        self.allowed, self.delay, self.error = allowed, delay, error

    def can_start(self) -> tuple[bool, float]:
        if self.error is not None:
            raise self.error
        return self.allowed, self.delay


def failing(error: Exception) -> Callable[[], bool]:
    def fail() -> bool:
        raise error

    return fail


def checked(
    pool: Pool, limits: Limits | None = None, pressure: Pressure | None = None, **settings: Any
) -> PriorityAgeAssigner:
    """An assigner that asks these, whose names no package offers."""
    found = CheckerSettings().model_copy(update={"rate_limit": "test"} if limits else {})
    found.__dict__.update(
        {"limits": limits or CheckerSettings().limits, "pressure": pressure or CheckerSettings().pressure}
    )
    made = pool.assigner(**{"interval": 0.000001, "jitter": 0, **settings})
    made.reconfigure(made._settings, made._quotas, Rules(checkers=found))
    return made


def advise(pool: Pool, resource_class: str | None, **fields: Any) -> None:
    pool.database.run(lambda c: rates.advise(c, resource_class, actor="test", **fields))


def skips(pool: Pool) -> list[int]:
    return [row.skips for row in pool.rows("SELECT skips FROM rate_skips ORDER BY job_id")]


def test_jobs_of_a_class_that_is_advised_against_wait_and_others_start(pool: Pool) -> None:
    advise(pool, "claude_cli", allowed=False)
    (claude,) = pool.submit(terms=CLAUDE)
    (codex,) = pool.submit(terms=CODEX)
    (plain,) = pool.submit()
    pool.bot(capacity=9)
    pool.assigner().run_once()
    assert leased(pool) == {codex, plain}
    pool.database.run(lambda c: rates.withdraw_advice(c, "claude_cli", actor="test"))
    pool.assigner().run_once()
    assert leased(pool) == {claude, codex, plain}


def test_advice_for_all_holds_back_whatever_asks_for_more_than_a_place_until_its_time_is_over(pool: Pool) -> None:
    advise(pool, None, allowed=False, seconds=60)
    jobs = set(pool.submit(terms=CLAUDE) + pool.submit(terms={"locks": ["tree"]}))
    (plain,) = pool.submit()
    pool.bot(capacity=9)
    pool.assigner().run_once()
    assert leased(pool) == {plain}
    pool.change("UPDATE backpressure SET until = now()")
    pool.assigner().run_once()
    assert leased(pool) == {plain, *jobs}


def test_a_delay_is_waited_first_and_stretches_the_pause_of_those_jobs_alone(pool: Pool) -> None:
    """Marianne waits, and only then starts a job; here each assigner does, and other classes do not notice."""
    advise(pool, "claude_cli", allowed=True, delay=20)
    first = pool.submit(terms=CLAUDE)
    pool.bot(capacity=9)
    moment = [100.0]
    assigner = pool.assigner(interval=60, jitter=0)
    assigner._admission._now = lambda: moment[0]
    assert 19 < assigner.run_once() < 20.2
    assert leased(pool) == set()
    (codex,) = pool.submit(terms=CODEX)
    moment[0] += 19.9
    assigner.run_once()
    assert leased(pool) == {codex}
    moment[0] += 0.2
    assigner.run_once()
    assert leased(pool) == {codex, *first}
    pool.submit(terms=CLAUDE)
    assert 19 < assigner.run_once() < 20.2
    assert leased(pool) == {codex, *first}


@pytest.mark.parametrize("advised", ["claude_cli", None])
def test_the_delay_lies_between_any_two_starts_also_of_one_cycle(pool: Pool, advised: str | None) -> None:
    advise(pool, advised, allowed=True, delay=2)
    pool.submit(5, terms=CLAUDE)
    pool.submit(1, terms=CODEX)
    pool.bot(capacity=9)
    moment = [100.0]
    assigner = pool.assigner(interval=60, jitter=0)
    assigner._admission._now = lambda: moment[0]
    started = []
    for _ in range(8):
        assigner.run_once()
        started.append(len(leased(pool)))
        moment[0] += 2.0
    of_others = 1 if advised else 0
    assert started == [of_others, *(of_others + n for n in range(1, 6)), *(6, 6)]


def test_explain_says_what_a_checker_refuses_and_what_it_advises(pool: Pool) -> None:
    (job,) = pool.submit(terms=CLAUDE)
    pool.bot()
    limits, pressure = Limits(), Pressure()
    rules = checked(pool, limits, pressure)._admission._rules

    def sentence() -> str:
        found = pool.database.run(lambda c: explain(c, job, instances=None, rules=rules))
        assert found is not None
        return found.sentence

    assert sentence().startswith("nothing stands in its way")
    limits.answers["claude_cli"] = lambda: True
    assert "is limited, says the checker 'test'" in sentence()
    limits.answers["claude_cli"] = failing(OSError("no route"))
    assert "cannot be checked: OSError: no route" in sentence()
    del limits.answers["claude_cli"]
    pressure.allowed = False
    assert "is advised against for now" in sentence()
    pressure.error = RuntimeError("broken")
    assert sentence().startswith("nothing stands in its way"), "the assigners go on, too"


def test_operators_advise_and_take_back_and_what_says_nothing_is_refused(pool: Pool) -> None:
    advise(pool, None, allowed=False, seconds=60, reason="provider down")
    advise(pool, "codex", allowed=True, delay=2)
    found = pool.database.run(rates.advice_in_force)
    assert [(each.resource_class, each.allowed, each.delay) for each in found] == [(None, False, 0), ("codex", True, 2)]
    pool.database.run(lambda c: rates.withdraw_advice(c, None, actor="test"))
    with pytest.raises(NotFound, match="nothing is advised for all jobs"):
        pool.database.run(lambda c: rates.withdraw_advice(c, None, actor="test"))
    for wrong in ({"allowed": True}, {"allowed": False, "delay": -1}, {"allowed": False, "seconds": 0}):
        with pytest.raises(BadInput):
            advise(pool, None, **wrong)
    noted = [row.action for row in pool.rows("SELECT action FROM audit ORDER BY id")]
    assert noted == ["backpressure.set", "backpressure.set", "backpressure.rm"]


def test_a_checker_is_asked_once_for_each_resource_and_absent_is_no_check(pool: Pool) -> None:
    limits = Limits()
    limits.answers["claude_cli"] = lambda: True
    pool.submit(3, terms=CLAUDE)
    codex = pool.submit(3, terms=CODEX)
    pool.submit(1, terms={"locks": ["tree"]})
    pool.bot(capacity=6)
    checked(pool, limits).run_once()
    assert sorted(limits.asked) == [("claude_cli", None), ("codex", "large")]
    assert leased(pool) > set(codex)
    assert len(leased(pool)) == 4
    checked(pool).run_once()
    assert len(leased(pool)) == 6


def test_a_backpressure_checker_joins_what_operators_advise_and_its_errors_are_no_advice(pool: Pool) -> None:
    jobs = pool.submit(2, terms=CLAUDE)
    pool.bot(capacity=1)
    checked(pool, pressure=Pressure(allowed=False)).run_once()
    assert leased(pool) == set()
    advise(pool, "codex", allowed=False)
    with capture_logs() as logs:
        checked(pool, pressure=Pressure(error=OSError("no answer"))).run_once()
    assert leased(pool) == {jobs[0]}
    assert [each["event"] for each in logs if each["log_level"] == "warning"] == [
        "leasehold.backpressure_checker_error"
    ]


@pytest.mark.parametrize("error", [RuntimeError("down"), ValueError("bad"), OSError("gone")])
def test_a_check_that_fails_is_counted_and_the_tenth_parks_the_job(pool: Pool, error: Exception) -> None:
    """Nothing vanishes: the job is held with the error until an operator releases it, and then begins anew."""
    limits = Limits()
    limits.answers["claude_cli"] = failing(error)
    (job,) = pool.submit(terms=CLAUDE)
    (codex,) = pool.submit(terms=CODEX)
    pool.bot(capacity=9)
    assigner = checked(pool, limits)
    with capture_logs() as logs:
        for _ in range(9):
            assigner.run_once()
        assert (pool.job(job).state, skips(pool)) == ("queued", [9])
        assigner.run_once()
    assert leased(pool) == {codex}
    row = pool.job(job)
    assert (row.state, row.reason) == (
        "parked",
        f"its rate limit could not be checked: {type(error).__name__}: {error}",
    )
    assert pool.history(job) == ["submit", "hold"]
    told = [each["event"] for each in logs]
    assert told.count("leasehold.rate_limiter_error") == 10
    (exhausted,) = [each for each in logs if each["event"] == "leasehold.rate_limiter_error_exhausted"]
    assert (exhausted["job"], exhausted["skips"]) == (job, 10)

    pool.database.run(lambda c: unpark(c, [job], instances=None, reason=None, actor="operator"))
    assigner.run_once()
    assert (pool.job(job).state, skips(pool)) == ("queued", [1])
    limits.answers.clear()
    assigner.run_once()
    assert (pool.job(job).state, skips(pool)) == ("leased", [])


def test_any_check_that_works_begins_the_count_anew(pool: Pool) -> None:
    limits = Limits()
    limits.answers["claude_cli"] = failing(RuntimeError("down"))
    (job,) = pool.submit(terms=CLAUDE)
    pool.bot()
    assigner = checked(pool, limits)
    for _ in range(9):
        assigner.run_once()
    limits.answers["claude_cli"] = lambda: True
    assigner.run_once()
    assert skips(pool) == []
    limits.answers["claude_cli"] = failing(RuntimeError("down"))
    for _ in range(9):
        assigner.run_once()
    assert (pool.job(job).state, skips(pool)) == ("queued", [9])


def test_a_hiccup_seen_by_many_assigners_counts_once_in_an_interval(pool: Pool) -> None:
    limits = Limits()
    limits.answers["claude_cli"] = failing(RuntimeError("down"))
    pool.submit(terms=CLAUDE)
    pool.bot()
    for _ in range(20):
        checked(pool, limits, interval=60).run_once()
    assert skips(pool) == [1]


def test_a_look_that_gives_nothing_says_why(pool: Pool) -> None:
    def seen(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"leasehold_gated_{name}_total", labels) or 0.0

    before = {
        (name, gate): seen(name, **{label: gate})
        for name, label in (("queues_closed", "gate"), ("picks_empty", "reason"))
        for gate in ("rate", "backpressure", "concurrency", "no room")
    }

    def more(name: str, label: str, gate: str) -> float:
        now = seen(name, **{label: gate})
        then, before[name, gate] = before[name, gate], now
        return now - then

    pool.submit(2, terms=CLAUDE)
    pool.assigner().run_once()
    assert more("picks_empty", "reason", "no room") == 1
    bot = pool.bot(capacity=9)
    pool.database.run(lambda c: rates.set_rate(c, "claude_cli", per_second=0.001, burst=1, actor="test"))
    pool.assigner().run_once()
    pool.assigner().run_once()
    assert (more("queues_closed", "gate", "rate"), more("picks_empty", "reason", "rate")) == (1, 1)
    advise(pool, None, allowed=False)
    pool.assigner().run_once()
    assert (more("queues_closed", "gate", "backpressure"), more("picks_empty", "reason", "backpressure")) == (1, 1)
    pool.database.run(lambda c: counters.limit(c, "pool:jobs", 1))
    pool.assigner().run_once()
    assert more("picks_empty", "reason", "concurrency") == 1
    assert len(bot.take()) == 1


def test_nothing_of_this_is_read_where_nothing_of_it_is_used(pool: Pool) -> None:
    """Whoever only takes locks pays for no rate, no advice, no share and no check."""
    pool.submit(3, terms={"locks": ["tree"]})
    pool.bot()
    with statements() as sent:
        pool.assigner().run_once()
    unused = [each for each in sent if "rate_buckets" in each or "rate_skips" in each or "graph:" in each]
    assert unused == []
    assert [each for each in sent if "FROM backpressure WHERE" in each] == []
    assert rules.RULES.checkers.checks_limits is False


# One rate, two assigner processes: never above it by the times of the grants, and hardly below it.


PROCESSES = 2
PER_SECOND, BURST = 50, 25
#: Jobs of the limited class, more than can start while the test looks, and of another one.
LIMITED, FREE = 1500, 100
SECONDS = 3.0
#: Part of the rate that has to be used, also on a machine that does much else.
USED = 0.3

GRANTED = """
SELECT extract(epoch FROM l.granted_at)::float AS at FROM leases l JOIN jobs j ON j.id = l.job_id
JOIN queues q ON q.id = j.queue
JOIN constraint_sets g ON g.id = q.constraint_set WHERE g.terms->>'resource_class' = :resource ORDER BY 1"""


def grants(pool: Pool, resource: str) -> list[float]:
    return [row.at for row in pool.rows(GRANTED, resource=resource)]


def test_a_rate_shared_by_two_processes_is_kept_in_every_second_and_used(
    pool: Pool, database_url: str, chance: random.Random
) -> None:
    """interval is a second and more: nothing but the bucket itself can bring assigners back in time."""
    pool.database.run(lambda c: rates.set_rate(c, "claude_cli", per_second=PER_SECOND, burst=BURST, actor="test"))
    for nth in range(20):
        pool.bot(f"bot-{nth}", capacity=500)
    pool.submit(LIMITED, terms={"resource_class": "claude_cli"}, priority=-10)
    with assigner_processes(database_url, pool.timing, chance, [[None]] * PROCESSES):
        eventually(lambda: grants(pool, "claude_cli"))
        pool.submit(FREE, terms={"resource_class": "codex"})

        def over() -> bool:
            found = grants(pool, "claude_cli")
            return found[-1] - found[0] >= SECONDS and len(grants(pool, "codex")) == FREE

        eventually(over, every=0.25)
    found, free = grants(pool, "claude_cli"), grants(pool, "codex")

    most = max(bisect_left(found, at + 1.0) - nth for nth, at in enumerate(found))
    assert most <= PER_SECOND + BURST
    span = found[-1] - found[0] - 1.0
    used = (len(found) - bisect_left(found, found[0] + 1.0)) / (span * PER_SECOND)
    assert used >= USED
    assert len(found) < LIMITED, "jobs of another class do not wait for this one"
    print(f"{used:.1%} of the rate, at most {most} in a second; {FREE} others in {free[-1] - free[0]:.2f} s")
