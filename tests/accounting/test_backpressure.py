"""Advice to hold back, of operators and of checkers, and checks of rates that fail."""

from collections.abc import Callable
from typing import Any

import pytest
from leasehold.errors import BadInput, NotFound
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from assigner.admission import rules
from assigner.admission.checkers import CheckerSettings
from assigner.admission.rules import Rules
from assigner.cycle.assigner import PriorityAgeAssigner
from schema.accounting import counters, rates
from schema.moves.waiting.hold import unpark
from tests.support.explain import explained
from tests.support.plans import statements
from tests.support.pool import Pool

CLAUDE = {"resource_class": "claude_cli"}


def leased(pool: Pool) -> set[str]:
    return {str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE state = 'leased'")}


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


def checks(limits: Limits | None = None, pressure: Pressure | None = None) -> Rules:
    """Rules that ask these, whose names no package offers."""
    found = CheckerSettings().model_copy(update={"rate_limit": "test"} if limits else {})
    found.__dict__.update(limits=limits or found.limits, pressure=pressure or found.pressure)
    return Rules(checkers=found)


def checked(
    pool: Pool, limits: Limits | None = None, pressure: Pressure | None = None, *, interval: float = 0.000001
) -> PriorityAgeAssigner:
    return pool.assigner(interval=interval, jitter=0, rules=checks(limits, pressure))


def advise(pool: Pool, resource_class: str | None, **fields: Any) -> None:
    pool.database.run(lambda c: rates.advise(c, resource_class, actor="test", **fields))


def skips(pool: Pool) -> list[int]:
    return [row.skips for row in pool.rows("SELECT skips FROM rate_skips ORDER BY job_id")]


def test_advice_holds_back_a_class_or_whatever_asks_for_more_than_a_place(pool: Pool) -> None:
    """Until its time is over, or an operator takes it back."""
    advise(pool, None, allowed=False, seconds=60)
    advise(pool, "claude_cli", allowed=False)
    (claude,), (locked,), (plain,) = pool.submit(terms=CLAUDE), pool.submit(terms={"locks": ["tree"]}), pool.submit()
    pool.bot(capacity=9)
    pool.assigner().run_once()
    assert leased(pool) == {plain}
    pool.change("UPDATE backpressure SET until = now() WHERE until IS NOT NULL")
    pool.assigner().run_once()
    assert leased(pool) == {plain, locked}
    pool.database.run(lambda c: rates.withdraw_advice(c, "claude_cli", actor="test"))
    pool.assigner().run_once()
    assert leased(pool) == {plain, locked, claude}


def test_a_delay_is_waited_first_and_stretches_the_pause_of_those_jobs_alone(pool: Pool) -> None:
    """Marianne waits, and only then starts a job; here each assigner does, and other classes do not notice."""
    advise(pool, "claude_cli", allowed=True, delay=20)
    first = pool.submit(terms=CLAUDE)
    pool.bot(capacity=9)
    moment = [100.0]
    assigner = pool.assigner(interval=60, jitter=0, now=lambda: moment[0])
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
    assigner = pool.assigner(interval=60, jitter=0, now=lambda: moment[0])
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
    rules = checks(limits, pressure)

    def sentence() -> str:
        return explained(pool, job, rules=rules).sentence

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


def test_a_check_that_fails_is_counted_and_the_tenth_parks_the_job(pool: Pool) -> None:
    """Nothing vanishes: the job is held with the error until an operator releases it, and then begins anew."""
    limits = Limits()
    limits.answers["claude_cli"] = failing(OSError("gone"))
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
    assert (row.state, row.reason) == ("parked", "its rate limit could not be checked: OSError: gone")
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
    pool.database.run(lambda c: rates.set_rates(c, {"claude_cli": rates.RateTerms(0.001, 1)}, actor="test"))
    pool.assigner().run_once()
    pool.assigner().run_once()
    assert (more("queues_closed", "gate", "rate"), more("picks_empty", "reason", "rate")) == (1, 1)
    advise(pool, None, allowed=False)
    pool.assigner().run_once()
    assert (more("queues_closed", "gate", "backpressure"), more("picks_empty", "reason", "backpressure")) == (1, 1)
    pool.database.run(lambda c: counters.limit_all(c, {"pool:jobs": 1}))
    pool.assigner().run_once()
    assert more("picks_empty", "reason", "concurrency") == 1
    assert len(bot.take()) == 1


def test_nothing_of_this_is_read_where_nothing_of_it_is_used(pool: Pool) -> None:
    """Nothing of rates, advice, shares and checks is read where jobs take locks alone."""
    pool.submit(3, terms={"locks": ["tree"]})
    pool.bot()
    with statements() as sent:
        pool.assigner().run_once()
    unused = ("rate_buckets", "rate_skips", "graph:", "FROM usage")
    assert [each for each in sent if any(name in each for name in unused)] == []
    assert [each for each in sent if "FROM backpressure WHERE" in each] == []
    assert rules.RULES.checkers.checks_limits is False
