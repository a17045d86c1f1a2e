"""What a job is expected to use, where whoever submits it does not say."""

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import httpx
import pytest
from leasehold.errors import LeaseholdError
from pydantic import ValidationError

from assigner import estimation
from assigner.admission import rules
from assigner.config import plugins
from assigner.estimation import EstimateSettings, Quantiles, RunTimeAdvice
from assigner.maintenance.upkeep import UpkeepSettings
from schema.accounting import counters
from schema.picking import constrained
from schema.picking.ready import Scope
from schema.policy import priority_classes
from schema.policy.priority_classes import Prediction
from schema.postgres.connection import Connection
from schema.requests import JobRequest
from tests.support.pool import Bot, Pool, completed
from tests.support.servers import Served


def request(**fields: Any) -> dict[str, Any]:
    return JobRequest.model_validate({"command": ["make", "it"], **fields}).normal()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"command": ["solve", "a Complex problem"], "instance": "acme"}, 8),
        ({}, 3),
        ({"label": "complex"}, 6),
        ({"instance": "acme"}, 5),
    ],
)
def test_the_estimate_is_3_twice_that_if_complex_and_2_more_in_a_project(
    fields: dict[str, Any], expected: float
) -> None:
    assert estimation.guess_usage(request(**fields)) == expected


def test_nothing_is_guessed_unless_it_is_asked_for_or_if_the_job_says_so_itself() -> None:
    assert EstimateSettings().estimate is None
    assert "estimated_cost" not in estimation.with_estimate(request(), None)
    told = estimation.with_estimate(request(estimated_cost=0.5), EstimateSettings(estimator="usage").estimate)
    assert told["estimated_cost"] == 0.5
    with pytest.raises(ValueError, match="'usag' is not an estimator: there are 'usage'; did you mean 'usage'"):
        EstimateSettings(estimator="usag")


def test_a_package_may_guess_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {
        "seven": "tests.policy.test_estimation:seven",
        "wrong": "tests.policy.test_estimation:wrong",
        "absent": "tests:absent",
    }
    found = EntryPoints(EntryPoint(name, place, estimation.ESTIMATORS_GROUP) for name, place in offered.items())
    monkeypatch.setattr(plugins, "entry_points", lambda **which: found.select(**which))
    made = EstimateSettings(estimator="seven").estimate
    assert estimation.with_estimate(request(), made)["estimated_cost"] == 7
    with pytest.raises(LeaseholdError, match="estimator 'wrong' gave -1"):
        estimation.load_estimator("wrong")(request())
    with pytest.raises(ValueError, match=r"'absent' \(tests:absent\) cannot be loaded: AttributeError"):
        estimation.load_estimator("absent")


def test_what_is_guessed_is_written_at_the_submit_and_stays(served: Served, operator: httpx.Client, pool: Pool) -> None:
    served.app.state.estimate = estimation.guess_usage
    body = {"jobs": [{"command": ["complex"], "locks": ["tree"]}, {"command": ["true"], "locks": ["tree"]}]}
    assert operator.post("/v1/jobs", json=body).status_code == 200
    graph = {"name": "g", "instance": "ci", "nodes": [{"node": 1, "command": ["true"], "locks": ["tree"]}]}
    assert operator.post("/v1/graphs", json=graph).status_code == 200
    served.app.state.estimate = None
    kept = pool.rows("SELECT estimate FROM job_constraints ORDER BY job_id")
    assert [float(row.estimate) for row in kept] == [6, 3, 5]


def test_a_job_of_which_nothing_was_said_is_estimated_at_1_however_it_was_submitted(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    served.app.state.estimate = None
    job = {"command": ["true"], "instance": "ci", "locks": ["tree"]}
    for jobs in ([job], [job, {**job, "metadata": {"a": "b"}}], [{**job, "dedup_key": "one"}]):
        assert operator.post("/v1/jobs", json={"jobs": jobs}).status_code == 200
    ids = [str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs")]
    assert pool.rows("SELECT FROM job_constraints") == []
    assert [operator.get(f"/v1/jobs/{each}").json()["estimated_cost"] for each in ids] == [1] * 4
    pool.database.run(lambda c: counters.set_limits(c, counters.SLOTS_OF_LOCK, {("ci", "tree"): 4}, actor="test"))
    pool.bot(capacity=9)
    assert pool.assigner().run_once() >= 0
    assert pool.row("SELECT used FROM counters WHERE name = 'instance:ci:cost'").used == 4


def seven(_request: Any) -> int:
    return 7


def wrong(_request: Any) -> int:
    return -1


# Predicted durations: from the jobs of a class that ran last, for slack and for the order.


def ran(pool: Pool, bot: Bot, seconds: list[float], **fields: Any) -> None:
    """Jobs with these fields that the bot has run, each for so long."""
    jobs = pool.submit(len(seconds), **fields)
    pool.assigner().run_once()
    bot.sync(*(completed(lease) for lease in bot.take()))
    for job, took in zip(jobs, seconds, strict=True):
        pool.change(
            "UPDATE jobs SET started_at = finished_at - make_interval(secs => :took)"
            " WHERE public_id = CAST(:id AS uuid)",
            id=job,
            took=took,
        )


def of_class(name: str) -> dict[str, Any]:
    return JobRequest(command=["true"], job_class=name).normal()


def test_the_next_job_of_a_class_is_expected_to_run_as_long_as_the_last(pool: Pool) -> None:
    bot = pool.bot(capacity=100)
    ran(pool, bot, [1, 2, 3, 4, 5, 6, 7, 8, 9, 100], **of_class("random"))
    ran(pool, bot, [50.0] * 4, **of_class("serious"))
    pool.submit(20)
    estimation.predict(pool.database, "quantiles")
    known = {each.name: (each.seconds, each.seconds_high) for each in pool.database.run(priority_classes.classes)}
    median, high = known["random"]
    assert (median, high) == (pytest.approx(5.5), pytest.approx(18.1))
    assert known["serious"] == (None, None), "four are not enough"
    assert Quantiles().predict({"a": [7.0] * 9, "b": [1.0]}) == {"a": Prediction(7.0, 7.0)}
    before = pool.row("SELECT xmin FROM job_classes WHERE name = 'random'").xmin
    estimation.predict(pool.database, "quantiles")
    assert pool.row("SELECT xmin FROM job_classes WHERE name = 'random'").xmin == before


def test_a_job_with_a_deadline_is_hastened_by_what_its_class_takes(pool: Pool) -> None:
    pool.change("UPDATE job_classes SET seconds = 100, seconds_high = 900 WHERE name = 'random'")

    def submitted(**fields: object) -> str:
        request = JobRequest(command=["true"], job_class="random", deadline_seconds=1000, **fields)  # type: ignore[arg-type]
        (job,) = pool.submit(**request.normal())
        return job

    long, known = submitted(), submitted(estimated_seconds=10)
    pool.upkeep().run_once()
    assert (pool.history(long), pool.history(known)) == (["submit", "hasten"], ["submit"])

    pool.bot()
    now = pool.row("SELECT now() AS now").now

    def read(connection: Connection) -> dict[str, float | None]:
        found = constrained.queues(connection, Scope(None), batch=9, after=constrained.FIRST_QUEUE)
        state = rules.read_admission_state(connection, found.queues, now=now, rules=rules.RULES)
        heads = constrained.heads(connection, found.queues, limits=[9] * len(found.queues), now=now)
        return {str(each.job.public_id): state.expected(each) for each in heads}

    assert pool.database.run(read) == {long: 100.0, known: 10.0}


def test_a_predictor_of_a_package_is_known_by_its_name_and_checked(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def predict(self, ran: dict[str, list[float]]) -> dict[str, Prediction]:
            return dict.fromkeys(ran, Prediction(-1.0, 5.0))

    with pytest.raises(ValueError, match="'quantile' is not a predictor: there are 'quantiles'"):
        UpkeepSettings(predictor="quantile")
    ran(pool, pool.bot(capacity=9), [1.0] * 5, **of_class("random"))
    monkeypatch.setattr(estimation, "load_predictor", {"theirs": Wrong()}.__getitem__)
    with pytest.raises(LeaseholdError, match=r"gave -1\.0"):
        estimation.predict(pool.database, "theirs")


def test_where_no_job_has_a_class_no_job_is_read(pool: Pool) -> None:
    pool.submit(5)
    plan = pool.rows(
        "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) "
        + priority_classes.RECENT_RUN_TIMES.text.replace(":most", "5000")
    )
    jobs = [row[0] for row in plan if "jobs" in row[0]]
    assert jobs
    assert all("never executed" in line for line in jobs)


# Advice on run times that callers state.


ODD = ["make", 'it "ü"', "\x01\n\x7f\\"]


def test_an_estimate_far_from_like_jobs_is_advised_on_in_the_answer_and_stored_all_the_same(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    bot = pool.bot(capacity=100)
    ran(pool, bot, [10, 10, 10, 20, 90], label="nightly")
    ran(pool, bot, [1.0] * 5, payload={"command": ODD})
    ran(pool, bot, [1.0] * 4, label="rare")
    served.app.state.advise = RunTimeAdvice(pool.database, 3.0).advise
    jobs = [
        {"command": ["a"], "label": "nightly", "estimated_seconds": 31},
        {"command": ["a"], "label": "nightly", "estimated_seconds": 30},
        {"command": ["a"], "label": "nightly", "estimated_seconds": 3},
        {"command": ODD, "estimated_seconds": 100},
        {"command": ODD, "label": "new", "estimated_seconds": 100},
        {"command": ODD, "instance": "other", "estimated_seconds": 100},
        {"command": ["a"], "label": "rare", "estimated_seconds": 100},
        {"command": ["a"], "label": "nightly"},
    ]
    answer = operator.post("/v1/jobs", json={"jobs": jobs})
    assert [each["created"] for each in answer.json()["jobs"]] == [True] * len(jobs)
    labelled = "but half of the last 5 jobs with label 'nightly' took at most 10 s"
    assert answer.json()["advice"] == [
        {"job": 0, "text": f"it is estimated at 31 s, {labelled}"},
        {"job": 2, "text": f"it is estimated at 3 s, {labelled}"},
        {"job": 3, "text": "it is estimated at 100 s, but half of the last 5 jobs with this command took at most 1 s"},
    ]
    nodes = [{"node": 1, "command": ["a"]}, {"node": 7, "command": ODD, "estimated_seconds": 100}]
    graph = operator.post("/v1/graphs", json={"name": "g", "nodes": nodes}).json()
    assert graph["warnings"] == [f"node 7: {answer.json()['advice'][2]['text']}"]


def test_without_the_setting_or_a_stated_run_time_nothing_is_read(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    assert EstimateSettings().advice_factor is None
    for wrong in (1.0, 0.5, -3.0, float("inf")):
        with pytest.raises(ValidationError):
            EstimateSettings(advice_factor=wrong)
    assert operator.post("/v1/jobs", json={"jobs": [{"command": ["a"], "estimated_seconds": 1}]}).json()["advice"] == []

    class Unused:
        def run(self, _work: Any) -> Any:
            raise AssertionError("the database was asked")

    assert RunTimeAdvice(Unused(), 3.0).advise([request()]) == {}  # type: ignore[arg-type]


def test_run_times_are_read_at_most_once_a_minute_and_advice_is_bounded(pool: Pool) -> None:
    bot, passed = pool.bot(capacity=100), [0.0]
    advice = RunTimeAdvice(pool.database, 3.0, now=lambda: passed[0])
    stated = [request(label="nightly", estimated_seconds=1.0)] * 30
    assert advice.advise(stated) == {}
    ran(pool, bot, [10.0] * 5, label="nightly")
    passed[0] = 59.0
    assert advice.advise(stated) == {}
    passed[0] = 60.0
    assert list(advice.advise(stated)) == list(range(20))
