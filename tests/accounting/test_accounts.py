"""Instances that have a share of the pool: their limits, and the jobs that wait when they get one or lose it."""

import json
import os
import time
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from leasehold.errors import BadInput, NotFound
from pydantic import ValidationError

from assigner.admission.rules import Rules
from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.process.assign import declare
from assigner.settings import PoolSettings
from bots.agent import job_files
from bots.agent.attempts.attempt import RunContext
from bots.protocol import Outcome
from schema.accounting import accounts, counters
from schema.accounting.accounts import Account, PoolLimits, ReportedUsage
from schema.accounting.fair_share import FairShareSettings, Mode
from schema.moves import retention
from schema.moves.reassign import add_constraints, remove_constraints
from schema.moves.waiting.priority import review_waiting
from schema.picking import constrained
from schema.postgres.connection import Connection
from tests.support.agents import NEEDS_PROC, finish, start
from tests.support.explain import explained, gates_of
from tests.support.plans import watching
from tests.support.pool import Pool, completed
from tests.support.tenancy import no_share, share, used


def waiting(pool: Pool) -> tuple[int, int]:
    """How many queued jobs wait for a place alone, and how many at gates."""
    row = pool.row("""
        SELECT count(*) FILTER (WHERE NOT constrained), count(*) FILTER (WHERE constrained) FROM jobs
        WHERE state = 'queued'""")
    return row[0], row[1]


def test_jobs_that_wait_when_an_instance_gets_a_share_are_taken_over_in_batches_and_go_back(pool: Pool) -> None:
    pool.submit(7, instance="acme", priority=3)
    pool.submit(2)
    share(pool, "acme", max_concurrent=1)
    assert [pool.database.run(lambda c: add_constraints(c, 3)) for _ in range(4)] == [3, 3, 1, 0]
    assert waiting(pool) == (2, 7)
    assert {row.rank for row in pool.rows("SELECT rank FROM jobs WHERE constrained")} == {3.0}
    bot = pool.bot(capacity=20)
    for _ in range(3):
        pool.assigner().run_once()
    given = bot.take()
    assert len(given) == 3, "two that share nothing, and one of acme"
    bot.sync(*(completed(lease) for lease in given))
    no_share(pool, "acme")
    assert [pool.database.run(lambda c: remove_constraints(c, 4)) for _ in range(3)] == [4, 2, 0]
    assert waiting(pool) == (6, 0)
    pool.assigner().run_once()
    assert len(bot.take()) == 6


def test_a_job_that_rests_or_runs_when_its_instance_gets_a_share_is_taken_over_too(pool: Pool) -> None:
    _, bot, work = pool.running(instance="acme", max_attempts=3)
    pool.submit(instance="acme", properties={"absent": ["yes"]})
    pool.assigner().run_once()
    assert pool.row("SELECT count(*) AS n FROM queues WHERE schedule_after IS NOT NULL").n == 1
    share(pool, "acme")
    assert pool.database.run(lambda c: add_constraints(c, 10)) == 1
    bot.sync(completed(work, "released"))
    assert waiting(pool) == (1, 1)
    pool.upkeep().run_once()
    assert waiting(pool) == (0, 2)


def test_a_job_with_terms_of_its_own_stays_at_its_gates_when_its_instance_loses_its_share(pool: Pool) -> None:
    share(pool, "acme")
    pool.submit(instance="acme", terms={"locks": ["tree"]})
    pool.submit(instance="acme")
    no_share(pool, "acme")
    assert pool.database.run(lambda c: remove_constraints(c, 10)) == 1
    assert waiting(pool) == (1, 1)
    with pytest.raises(NotFound):
        no_share(pool, "acme")


TREE: dict[str, Any] = {"terms": {"locks": ["tree"]}}


@pytest.mark.parametrize(
    ("shares", "jobs", "runs"),
    [
        pytest.param({"acme": {"max_concurrent": 2}}, {}, [2], id="jobs of an instance"),
        pytest.param({"acme": {}, "brick": {}}, {"estimated_cost": 3}, [1, 1], id="a budget of all"),
        pytest.param({"acme": {}, "brick": {}}, {}, [3, 3], id="an empty map of slots"),
        pytest.param({"acme": {"slots": 1}, "brick": {}}, {}, [1, 3], id="slots of one"),
        pytest.param({"acme": {"slots": 1}, "brick": {"slots": 0}}, {}, [1, 0], id="slots of both"),
        pytest.param({"acme": {"locks": {"tree": 2}}}, TREE, [2], id="slots of a lock"),
    ],
)
def test_an_instance_runs_no_more_jobs_than_its_limits_let_it(
    pool: Pool, shares: dict[str, dict[str, Any]], jobs: dict[str, Any], runs: list[int]
) -> None:
    pool.database.run(lambda c: accounts.limit_pool(c, PoolLimits(budget=6, max_concurrent=None), actor="test"))
    for name, limits in shares.items():
        share(pool, name, **limits)
        pool.submit(3, instance=name, **jobs)
    bot = pool.bot(capacity=10)
    for _ in range(2):
        pool.assigner().run_once()
    given = [work["instance"] for work in bot.take()]
    assert [given.count(name) for name in shares] == runs


def test_slots_that_were_taken_since_they_were_read_refuse_a_charge(pool: Pool) -> None:
    share(pool, "acme", slots=2)
    jobs = counters.instance_counter("acme", "jobs")

    def charge(connection: Connection, number: int) -> None:
        counters.take(connection, [{jobs: 1.0}] * number)

    with pytest.raises(psycopg.Error, match="a limit was reached meanwhile"):
        pool.database.run(lambda c: charge(c, 3), repeat=False)
    found = pool.database.run(lambda c: counters.read(c, [jobs]))
    assert {name: (each.used, each.most) for name, each in found.items()} == {
        jobs: (0.0, None),
        counters.instance_counter("acme", "slots"): (0.0, 2.0),
    }
    no_share(pool, "acme")
    assert pool.database.run(lambda c: counters.read(c, [jobs])) == {jobs: counters.Counter(0.0, None)}


def test_what_is_so_already_is_not_written_and_every_change_is_audited(pool: Pool) -> None:
    for _ in range(2):
        share(pool, "acme", weight=3, budget=10, locks={"tree": 2})
    share(pool, "acme", budget=None)
    no_share(pool, "acme")
    notes = pool.rows("SELECT action, details FROM audit ORDER BY id")
    assert [note.action for note in notes] == ["account.set", "account.set", "account.remove"]
    assert notes[0].details["limits"] == {"instance:acme:cost": 10, "lock:acme:tree": 2}
    assert notes[1].details["limits"] == {"instance:acme:cost": None}
    share(pool, "acme", weight=0)
    with pytest.raises(psycopg.IntegrityError):
        pool.change("UPDATE accounts SET credit_weight = -1")


def test_operators_set_shares_and_limits_by_the_api(operator: httpx.Client) -> None:
    account = {"weight": 3, "max_concurrent": 4, "budget": 50.5, "slots": 2, "unit": "tokens"}
    assert operator.put("/v1/instances/acme/account?create=true", json=account).status_code == 200
    assert operator.put("/v1/instances/acme/account", json={"budget": None}).status_code == 200
    (found,) = [one for one in operator.get("/v1/instances").json()["instances"] if one["name"] == "acme"]
    assert {key: found[key] for key in account} == account | {"budget": None}
    for wrong in ({"weight": -1}, {"weight": "3"}, {"slots": 1.5}, {"unit": "Tokens"}, {"most": 1}):
        assert operator.put("/v1/instances/acme/account", json=wrong).status_code == 422
    assert operator.get("/v1/usage", params={"hours": 1}).json() == {"usage": []}
    assert operator.get("/v1/usage", params={"hours": "nan"}).status_code == 422
    assert operator.delete("/v1/instances/acme/account").status_code == 200
    assert operator.delete("/v1/instances/acme/account").status_code == 404
    assert operator.put("/v1/limits", json={"budget": 7}).status_code == 200
    assert operator.get("/v1/limits").json() == {
        "max_concurrent": {"used": 0, "most": None},
        "budget": {"used": 0, "most": 7},
    }


def fair(pool: Pool, **settings: Any) -> PriorityAgeAssigner:
    """An assigner with these settings of the shares."""
    return pool.assigner(minimums_first=False, rules=Rules(fair=FairShareSettings(**settings)))


@pytest.mark.parametrize(("mode", "runs"), [("literal", ["acme"]), ("demand", ["acme", "brick", "brick"])])
def test_literally_an_instance_without_slots_has_none_where_another_has_some(
    pool: Pool, mode: Mode, runs: list[str]
) -> None:
    share(pool, "acme", slots=1)
    share(pool, "brick")
    jobs = {name: pool.submit(2, instance=name)[0] for name in ("acme", "brick")}
    bot = pool.bot(capacity=10)
    rules = Rules(fair=FairShareSettings(mode=mode))
    for name, job in jobs.items():
        assert gates_of(explained(pool, job, rules=rules))["slots"].open is (name in runs)
    fair(pool, mode=mode).run_once()
    assert sorted(work["instance"] for work in bot.take()) == runs


@pytest.mark.parametrize(("reserve", "runs"), [(True, 2), (False, 3)])
def test_a_budget_that_is_not_reserved_is_overshot_by_one_job_at_most(pool: Pool, reserve: bool, runs: int) -> None:
    share(pool, "acme", budget=5)
    pool.submit(9, instance="acme", estimated_cost=2)
    bot = pool.bot(capacity=10)
    for _ in range(3):
        fair(pool, budget_reserve=reserve).run_once()
    assert len(bot.take()) == runs


def test_of_charges_that_lost_a_race_for_a_budget_only_the_last_overshoots_it(pool: Pool) -> None:
    pool.change("INSERT INTO counters (name, used, most) VALUES ('instance\\:x\\:cost', 0, 5)")

    def take(times: int) -> None:
        amounts = [{"instance:x:cost": 4.0}] * times
        pool.database.run(lambda c: counters.take(c, amounts, may_overshoot=True), repeat=False)

    with pytest.raises(psycopg.Error, match="a limit was reached meanwhile"):
        take(3)
    take(2)
    with pytest.raises(psycopg.Error, match="a limit was reached meanwhile"):
        take(1)
    assert pool.row("DELETE FROM counters RETURNING used").used == 8


@pytest.mark.parametrize("reserve", [True, False])
def test_a_budget_that_is_used_up_stops_what_costs_nothing_too(pool: Pool, reserve: bool) -> None:
    share(pool, "acme", budget=2)
    pool.submit(instance="acme", estimated_cost=2, priority=-1)
    pool.submit(5, instance="acme", estimated_cost=0)
    bot = pool.bot(capacity=10)
    for _ in range(2):
        fair(pool, budget_reserve=reserve).run_once()
    assert len(bot.take()) == 1


def test_the_guarantee_counts_the_jobs_of_the_window_and_those_that_run(pool: Pool) -> None:
    for name, weight in {"acme": 1, "brick": 1000}.items():
        share(pool, name, weight=weight)
        pool.submit(4, instance=name)
    bot = pool.bot(capacity=2)
    fair(pool).run_once()
    given = bot.take()
    assert sorted(work["instance"] for work in given) == ["acme", "brick"], "one each"
    bot.sync(*(completed(work) for work in given))
    fair(pool).run_once()
    given = bot.take()
    assert [work["instance"] for work in given] == ["brick", "brick"]
    bot.sync(*(completed(work) for work in given))
    pool.change("UPDATE usage SET bucket = bucket - interval '25 hours'")
    pool.upkeep().run_once()
    fair(pool).run_once()
    assert sorted(work["instance"] for work in bot.take()) == ["acme", "brick"], "in each window"


def test_the_configuration_declares_shares_and_limits_of_all_once(pool: Pool) -> None:
    settings = PoolSettings.model_validate(
        {
            "instances": [{"name": "acme", "weight": 3, "budget": 9, "locks": {"tree": 2}}, {"name": "brick"}],
            "fair_share": {"budget": 100, "max_concurrent": 7, "rolling_window_hours": 12},
        }
    )
    for _ in range(2):
        declare(pool.database, settings)
    assert [row.action for row in pool.rows("SELECT action FROM audit ORDER BY id")] == [
        *["instance.set"] * 2,
        "account.set",
        "pool.limit",
    ]
    most = {row.name: row.most for row in pool.rows("SELECT name, most FROM counters")}
    assert most == {"instance:acme:cost": 9, "lock:acme:tree": 2, "pool:cost": 100, "pool:jobs": 7}
    assert [row.name for row in pool.rows("SELECT name FROM instances WHERE managed")] == ["acme"]


@pytest.mark.parametrize("known", [False, True])
def test_what_upkeep_does_for_shares_reads_none_of_the_jobs_and_counters_that_it_leaves(
    pool: Pool, known: bool
) -> None:
    share(pool, "acme")
    pool.change("UPDATE accounts SET demand_at = now() - interval '1 h'")
    pool.change("INSERT INTO counters (name) SELECT 'lock\\:' || n FROM generate_series(1, 2000) n")
    pool.submit(300)
    pool.submit(300, terms={"locks": ["tree"]})
    pool.submit(3, instance="acme")
    if known:
        pool.change("ANALYZE")

    def work(connection: Connection) -> None:
        for duty in (
            constrained.unrecorded_demand,
            lambda c: add_constraints(c, 100),
            lambda c: remove_constraints(c, 100),
        ):
            with watching(connection) as watch:
                duty(connection)
            assert not {"jobs", "counters"} & watch.whole_scans(), str(watch)
            assert watch.touched < 60, str(watch)

    pool.database.run(work)


# What attempts have used: said by commands, told by bots, charged once, forgotten with the window.


def counted_usage(pool: Pool) -> dict[str, tuple[float, int]]:
    """Amount and jobs of each name of usage."""
    rows = pool.rows("SELECT name, sum(amount) AS amount, sum(jobs) AS jobs FROM usage GROUP BY name")
    return {row.name: (float(row.amount), row.jobs) for row in rows}


@NEEDS_PROC
def test_a_command_says_what_it_used_in_the_file_that_it_is_given(place: RunContext) -> None:
    said = '{"tokens": 1200, "cost": 0.25}'
    outcome = finish(start(place, "sh", "-c", f"echo '{said}' > $LEASEHOLD_USAGE; exit 3"))
    assert (outcome.verdict, outcome.usage) == ("failed", {"tokens": 1200, "cost": 0.25})


@NEEDS_PROC
@pytest.mark.parametrize("write", ["echo nonsense >", "mkdir", "mkfifo", "ln -s /etc/passwd", "truncate -s 20000"])
def test_a_command_that_says_it_wrongly_has_not_failed(place: RunContext, write: str) -> None:
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
        job_files.read_usage(path)
    if wrong is not None:
        with pytest.raises(ValidationError):
            Outcome.model_validate({"verdict": "succeeded", "usage": wrong})


def test_amounts_without_end_and_too_many_of_them_are_refused(tmp_path: Path) -> None:
    for word in ("NaN", "Infinity", "1e999"):
        (tmp_path / "usage").write_text(f'{{"tokens": {word}}}')
        with pytest.raises(BadInput):
            job_files.read_usage(tmp_path / "usage")
    (tmp_path / "usage").write_text(json.dumps({f"unit-{nth:030}": 1 for nth in range(8)}))
    with pytest.raises(BadInput, match="says more than 200 bytes"):
        job_files.read_usage(tmp_path / "usage")
    assert job_files.read_usage(tmp_path / "absent") is None
    os.truncate(tmp_path / "usage", 0)
    assert job_files.read_usage(tmp_path / "usage") is None


def run_one(pool: Pool, verdict: str = "succeeded", *, fields: dict[str, Any] | None = None, **outcome: Any) -> None:
    pool.submit(instance="acme", estimated_cost=4, **(fields or {}))
    bot = pool.bot(f"bot-{pool.chance.getrandbits(40)}")
    (work,) = pool.given(bot)
    bot.sync(completed(work, verdict, **outcome))
    bot.sync(status="gone")


def test_a_budget_counts_the_unit_of_its_instance_and_all_units_are_kept_for_reports(pool: Pool) -> None:
    share(pool, "acme", unit="tokens", budget=5000)
    run_one(pool, usage={"tokens": 1200.5, "cost": 0.25}, seconds=7)
    assert used(pool, "instance:acme:cost") == used(pool, "pool:cost") == 1200.5
    assert counted_usage(pool) == {
        "instance:acme:cost": (1200.5, 1),
        "pool:cost": (1200.5, 1),
        "reported:acme:tokens": (1200.5, 1),
        "reported:acme:cost": (0.25, 1),
    }
    found = pool.database.run(lambda c: accounts.reported_usage(c, hours=1))
    assert found == [ReportedUsage("acme", "cost", 0.25, 1), ReportedUsage("acme", "tokens", 1200.5, 1)]


@pytest.mark.parametrize(
    ("unit", "outcome", "charged"),
    [
        ("seconds", {"seconds": 7.5}, 7.5),
        ("seconds", {"seconds": 7.5, "usage": {"seconds": 3}}, 7.5),
        ("seconds", {"seconds": 7.5, "usage": {"seconds": 30}}, 30),
        ("seconds", {"usage": {"seconds": 3}}, 3),
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


def ceiling(pool: Pool, unit: str, amount: float) -> None:
    pool.database.run(lambda c: accounts.set_report_ceiling(c, "acme", unit, amount, actor="test"))


@pytest.mark.parametrize(
    ("unit", "outcome", "charged", "cut"),
    [
        ("tokens", {"usage": {"tokens": 1000}}, 1000, []),
        ("tokens", {"usage": {"tokens": 1000.5}}, 1000, [{"unit": "tokens", "reported": 1000.5, "counted": 1000}]),
        ("tokens", {"usage": {"cost": 9e9}}, 4, []),
        ("tokens", {"usage": {"tokens": 1e9, "seconds": 9, "cost": 1}}, 1000,
         [{"unit": "seconds", "reported": 9, "counted": 5}, {"unit": "tokens", "reported": 1e9, "counted": 1000}]),
        ("seconds", {"seconds": 7.5, "usage": {"seconds": 9}}, 7.5, [{"unit": "seconds", "reported": 9, "counted": 5}]),
        ("seconds", {"seconds": 2, "usage": {"seconds": 9}}, 5, [{"unit": "seconds", "reported": 9, "counted": 5}]),
        ("seconds", {"seconds": 7.5}, 7.5, []),
    ],
)  # fmt: skip
def test_a_report_counts_up_to_its_ceiling_and_an_event_says_what_was_cut(
    pool: Pool, unit: str, outcome: dict[str, Any], charged: float, cut: list[dict[str, Any]]
) -> None:
    share(pool, "acme", unit=unit)
    ceiling(pool, "tokens", 1000)
    ceiling(pool, "seconds", 5)
    run_one(pool, **outcome)
    assert used(pool, "instance:acme:cost") == used(pool, "pool:cost") == charged
    for each in cut:
        assert counted_usage(pool)[f"reported:acme:{each['unit']}"] == (each["counted"], 1)
    events = pool.rows(
        "SELECT from_state, to_state, actor, details FROM job_events WHERE move = 'cut_report' ORDER BY id"
    )
    assert [row.details for row in events] == cut
    assert {(row.from_state, row.to_state, row.actor) for row in events} <= {("succeeded", "succeeded", "settle")}


def test_the_ceiling_holds_for_each_attempt_and_for_its_instance_alone(pool: Pool) -> None:
    share(pool, "acme", unit="tokens")
    ceiling(pool, "tokens", 10)
    run_one(pool, "failed", fields={"retry_failed": True}, usage={"tokens": 25})
    (cut,) = pool.rows("SELECT job_id, from_state, details FROM job_events WHERE move = 'cut_report'")
    assert (cut.from_state, cut.details["counted"]) == ("queued", 10)
    pool.change("UPDATE jobs SET schedule_after = NULL")
    bot = pool.bot("other")
    (work,) = pool.given(bot)
    bot.sync(completed(work, usage={"tokens": 25}))
    assert used(pool, "instance:acme:cost") == 20
    (job,) = pool.submit(instance="other", terms={"owner": "ann"})
    (work,) = pool.given(bot)
    bot.sync(completed(work, usage={"cost": 25, "tokens": 25}))
    assert counted_usage(pool)["owner:other:ann:cost"] == (25, 1)
    assert "cut_report" not in pool.history(job)
    bot.sync(status="gone")
    pool.database.run(lambda c: accounts.remove_report_ceiling(c, "acme", "tokens", actor="test"))
    run_one(pool, usage={"tokens": 25})
    assert used(pool, "instance:acme:cost") == 45, "one that is taken away cuts nothing more"
    assert pool.row("SELECT report_ceilings FROM instances WHERE name = 'acme'").report_ceilings is None


def test_of_an_attempt_that_is_repeated_what_was_said_is_charged_and_the_estimate_comes_back(pool: Pool) -> None:
    share(pool, "acme")
    run_one(pool, "failed", fields={"retry_failed": True, "max_attempts": 9}, usage={"cost": 1.5})
    assert used(pool, "instance:acme:cost") == 1.5
    pool.change("UPDATE jobs SET schedule_after = NULL")
    pool.bot("other")
    assert counted_usage(pool)["instance:acme:cost"] == (1.5, 0), "it is no job that is done"
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


def test_what_is_older_than_the_window_is_forgotten_by_upkeep_and_deleted_later(pool: Pool) -> None:
    share(pool, "acme")
    run_one(pool, usage={"cost": 3})
    pool.change("UPDATE usage SET bucket = bucket - interval '25 hours'")
    run_one(pool, usage={"cost": 2})
    pool.upkeep().run_once()
    assert used(pool, "instance:acme:cost") == 2
    kept = pool.database.run(lambda c: retention.delete_old_usage(c, age=26 * 3600, limit=10))
    gone = pool.database.run(lambda c: retention.delete_old_usage(c, age=3600, limit=10))
    assert (kept, gone) == (0, 3)
    assert counted_usage(pool)["instance:acme:cost"] == (2, 1)


def test_a_job_that_has_lost_its_constraints_is_ranked_by_its_priority_however_near_its_deadline(pool: Pool) -> None:
    share(pool, "acme")
    (job,) = pool.submit(instance="acme", deadline_seconds=60)
    no_share(pool, "acme")
    assert pool.database.run(lambda c: remove_constraints(c, 9)) == 1
    pool.change("UPDATE job_constraints SET watch_at = now() - interval '1 s', deadline = now()")
    pool.database.run(lambda c: review_waiting(c, 9, actor="test"))
    assert pool.job(job).rank == 0
    pool.bot()
    pool.assigner().run_once()
    assert pool.job(job).state == "leased"


def test_the_shares_of_thousands_of_instances_are_set_in_time_that_grows_as_they_do(pool: Pool) -> None:
    share = Account(weight=2.0, unit="cost", budget=9.5, max_concurrent=3, slots=4)
    began = time.thread_time()
    pool.database.run(lambda c: accounts.put_accounts(c, {f"i{nth}": share for nth in range(4000)}, actor="t"))
    # 0.3 s were seen, and 5 s when each share looked through the limits of all: then the server ends the transaction.
    assert time.thread_time() - began < 2.5
    noted = pool.row("SELECT details FROM audit WHERE action = 'account.set' AND subject = 'instance:i7'").details
    assert noted["limits"] == {"instance:i7:cost": 9.5, "instance:i7:jobs": 3, "instance:i7:slots": 4}
