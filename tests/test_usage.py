"""What attempts have used: said by commands, told by bots, charged once, forgotten with the window."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bots import usage
from bots.protocol import Outcome
from bots.runner import Place
from schema import counters, forgetting
from schema import usage as reports
from schema.errors import BadInput
from schema.usage import Reported
from tests.pool import Pool, completed
from tests.proc import NEEDS_PROC
from tests.runs import finish, start
from tests.tenancy import share


def used(pool: Pool, name: str) -> float:
    found = pool.database.run(lambda c: counters.read(c, [name]))
    return found[name].used if found else 0.0


def told(pool: Pool) -> dict[str, tuple[float, int]]:
    """Amount and jobs of each name of usage."""
    rows = pool.rows("SELECT name, sum(amount) AS amount, sum(jobs) AS jobs FROM usage GROUP BY name")
    return {row.name: (float(row.amount), row.jobs) for row in rows}


@NEEDS_PROC
def test_a_command_says_what_it_used_in_the_file_that_it_is_given(place: Place) -> None:
    said = '{"tokens": 1200, "cost": 0.25}'
    outcome = finish(start(place, "sh", "-c", f"echo '{said}' > $LEASEHOLD_USAGE; exit 3"))
    assert (outcome.verdict, outcome.usage) == ("failed", {"tokens": 1200, "cost": 0.25})


@NEEDS_PROC
@pytest.mark.parametrize("write", ["echo nonsense >", "mkdir", "mkfifo", "ln -s /etc/passwd", "truncate -s 20000"])
def test_a_command_that_says_it_wrongly_has_not_failed(place: Place, write: str) -> None:
    outcome = finish(start(place, "sh", "-c", f"{write} $LEASEHOLD_USAGE"))
    assert (outcome.verdict, outcome.usage) == ("succeeded", None)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tokens": -1}, {"tokens": "1"}, {"tokens": True}, {"tokens": 1e13}, {"Tokens": 1}, {"": 1}),
        *({f"u{nth}": 1 for nth in range(17)}, [1], None, 5),
    ],
)
def test_what_is_no_amount_by_unit_is_refused_by_the_agent_and_by_the_gateway(tmp_path: Path, wrong: Any) -> None:
    path = tmp_path / "usage"
    path.write_text(json.dumps(wrong))
    with pytest.raises(BadInput):
        usage.read(path)
    if wrong is not None:
        with pytest.raises(ValidationError):
            Outcome.model_validate({"verdict": "succeeded", "usage": wrong})


def test_amounts_without_end_and_too_many_of_them_are_refused(tmp_path: Path) -> None:
    for word in ("NaN", "Infinity", "1e999"):
        (tmp_path / "usage").write_text(f'{{"tokens": {word}}}')
        with pytest.raises(BadInput):
            usage.read(tmp_path / "usage")
    (tmp_path / "usage").write_text(json.dumps({f"unit-{nth:030}": 1 for nth in range(8)}))
    with pytest.raises(BadInput, match="says more than 200 bytes"):
        usage.read(tmp_path / "usage")
    assert usage.read(tmp_path / "absent") is None
    os.truncate(tmp_path / "usage", 0)
    assert usage.read(tmp_path / "usage") is None


def run_one(pool: Pool, verdict: str = "succeeded", *, fields: dict[str, Any] | None = None, **outcome: Any) -> None:
    pool.submit(instance="acme", estimated_cost=4, **(fields or {}))
    bot = pool.bot(f"bot-{pool.chance.getrandbits(40)}")
    pool.assigner().run_once()
    (work,) = bot.take()
    bot.sync(completed(work, verdict, **outcome))
    bot.sync(status="gone")


def test_a_budget_counts_the_unit_of_its_instance_and_all_units_are_kept_for_reports(pool: Pool) -> None:
    share(pool, "acme", unit="tokens", budget=5000)
    run_one(pool, usage={"tokens": 1200.5, "cost": 0.25}, seconds=7)
    assert used(pool, "instance:acme:cost") == used(pool, "pool:cost") == 1200.5
    assert told(pool) == {
        "instance:acme:cost": (1200.5, 1),
        "pool:cost": (1200.5, 1),
        "reported:acme:tokens": (1200.5, 1),
        "reported:acme:cost": (0.25, 1),
    }
    found = pool.database.run(lambda c: reports.reported(c, hours=1))
    assert found == [Reported("acme", "cost", 0.25, 1), Reported("acme", "tokens", 1200.5, 1)]


@pytest.mark.parametrize(
    ("unit", "outcome", "charged"),
    [
        ("seconds", {"seconds": 7.5}, 7.5),
        ("seconds", {"seconds": 7.5, "usage": {"seconds": 3}}, 3),
        ("cost", {"seconds": 7.5}, 4),
        ("cost", {"usage": {"tokens": 9}}, 4),
        ("cost", {"usage": {"cost": 0}}, 0),
    ],
)
def test_what_the_bot_does_not_say_is_the_run_time_or_the_estimate(
    pool: Pool, unit: str, outcome: dict[str, Any], charged: float
) -> None:
    share(pool, "acme", unit=unit)
    run_one(pool, **outcome)
    assert used(pool, "instance:acme:cost") == charged


def test_of_an_attempt_that_is_repeated_what_was_said_is_charged_and_the_estimate_comes_back(pool: Pool) -> None:
    share(pool, "acme")
    run_one(pool, "failed", fields={"retry_failed": True, "max_attempts": 9}, usage={"cost": 1.5})
    assert used(pool, "instance:acme:cost") == 1.5
    pool.change("UPDATE jobs SET schedule_after = NULL")
    pool.bot("other")
    assert told(pool)["instance:acme:cost"] == (1.5, 0), "it is no job that is done"
    pool.assigner().run_once()
    assert used(pool, "instance:acme:cost") == 5.5
    pool.restarted(pool.bot("other"))
    assert used(pool, "instance:acme:cost") == 1.5, "its bot is gone and has said nothing"


def test_the_largest_amounts_overflow_nothing(pool: Pool) -> None:
    share(pool, "acme")
    pool.submit(150, instance="acme", estimated_cost=1e12)
    bot = pool.bot(capacity=150)
    for _ in range(10):
        pool.assigner().run_once()
    given = bot.take()
    bot.sync(*(completed(each, usage={"cost": 1e12}) for each in given))
    assert used(pool, "instance:acme:cost") == len(given) * 1e12


def test_aq_11_what_is_older_than_the_window_is_forgotten_by_upkeep_and_deleted_later(pool: Pool) -> None:
    share(pool, "acme")
    run_one(pool, usage={"cost": 3})
    pool.change("UPDATE usage SET bucket = bucket - interval '25 hours'")
    run_one(pool, usage={"cost": 2})
    pool.upkeep().run_once()
    assert used(pool, "instance:acme:cost") == 2
    kept = pool.database.run(lambda c: forgetting.forget_usage(c, age=26 * 3600, limit=10))
    gone = pool.database.run(lambda c: forgetting.forget_usage(c, age=3600, limit=10))
    assert (kept, gone) == (0, 3)
    assert told(pool)["instance:acme:cost"] == (2, 1)
