"""What a job is expected to use, where whoever submits it does not say."""

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import httpx
import pytest

from assigner import estimation
from assigner.admission import rules
from assigner.config import plugins
from assigner.estimation import EstimateSettings, Quantiles
from assigner.maintenance.upkeep import UpkeepSettings
from assigner.placement.fleet import Fleet
from schema.errors import LeaseholdError
from schema.picking import constrained
from schema.picking.ready import Scope
from schema.policy import priority_classes
from schema.policy.priority_classes import Prediction
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
def test_sa_24_the_estimate_is_3_twice_that_if_complex_and_2_more_in_a_project(
    fields: dict[str, Any], expected: float
) -> None:
    assert estimation.guess_usage(request(**fields)) == expected


def test_sa_24_nothing_is_guessed_unless_it_is_asked_for_or_if_the_job_says_so_itself() -> None:
    assert EstimateSettings().estimate is None
    assert "estimated_cost" not in estimation.with_estimate(request(), None)
    told = estimation.with_estimate(request(estimated_cost=0.5), EstimateSettings(estimator="usage").estimate)
    assert told["estimated_cost"] == 0.5
    with pytest.raises(ValueError, match="'usag' is not an estimator: there are 'usage'; did you mean 'usage'"):
        EstimateSettings(estimator="usag")


def test_sa_24_a_package_may_guess_instead(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_36_what_is_guessed_is_written_at_the_submit_and_stays(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    served.app.state.estimate = estimation.guess_usage
    body = {"jobs": [{"command": ["complex"], "locks": ["tree"]}, {"command": ["true"], "locks": ["tree"]}]}
    assert operator.post("/v1/jobs", json=body).status_code == 200
    graph = {"name": "g", "instance": "ci", "nodes": [{"node": 1, "command": ["true"], "locks": ["tree"]}]}
    assert operator.post("/v1/graphs", json=graph).status_code == 200
    served.app.state.estimate = None
    kept = pool.rows("SELECT estimate FROM job_constraints ORDER BY job_id")
    assert [float(row.estimate) for row in kept] == [6, 3, 5]


def seven(_request: Any) -> int:
    return 7


def wrong(_request: Any) -> int:
    return -1


# Predicted durations: from the jobs of a class that ran last, for slack and for the order.


def ran(pool: Pool, bot: Bot, job_class: str, seconds: list[float]) -> None:
    """Jobs of a class that the bot has run for so long."""
    jobs = pool.submit(len(seconds), **JobRequest(command=["true"], job_class=job_class).normal())
    pool.assigner().run_once()
    given = {lease["job"]: lease for lease in bot.take()}
    bot.sync(*(completed(given[job]) for job in jobs))
    for job, took in zip(jobs, seconds, strict=True):
        pool.change(
            "UPDATE jobs SET started_at = finished_at - make_interval(secs => :took)"
            " WHERE public_id = CAST(:id AS uuid)",
            id=job,
            took=took,
        )


def test_sa_27_the_next_job_of_a_class_is_expected_to_run_as_long_as_the_last(pool: Pool) -> None:
    bot = pool.bot(capacity=100)
    ran(pool, bot, "random", [1, 2, 3, 4, 5, 6, 7, 8, 9, 100])
    ran(pool, bot, "serious", [50.0] * 4)
    pool.submit(20)
    estimation.predict(pool.database, "quantiles")
    known = {each.name: (each.seconds, each.seconds_high) for each in pool.database.run(priority_classes.classes)}
    median, high = known["random"]
    assert (median, high) == (pytest.approx(5.5), pytest.approx(18.1))
    assert known["serious"] == (None, None), "four are not enough"
    before = pool.row("SELECT xmin FROM job_classes WHERE name = 'random'").xmin
    estimation.predict(pool.database, "quantiles")
    assert pool.row("SELECT xmin FROM job_classes WHERE name = 'random'").xmin == before


def test_sa_27_quantiles_of_jobs_that_all_took_the_same_are_that() -> None:
    assert Quantiles().predict({"a": [7.0] * 9, "b": [1.0]}) == {"a": Prediction(7.0, 7.0)}


def test_sa_27_a_job_with_a_deadline_is_hastened_by_what_its_class_takes(pool: Pool) -> None:
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

    def read(connection: object) -> dict[str, float | None]:
        found = constrained.queues(connection, Scope(None), batch=9, after=constrained.FIRST_QUEUE)  # type: ignore[arg-type]
        admission_state = rules.read_admission_state(
            connection,  # type: ignore[arg-type]
            found.queues,
            fleet=Fleet(),
            chance=pool.chance,
            now=now,
            rules=rules.RULES,
        )
        heads = constrained.heads(connection, found.queues, limits=[9] * len(found.queues), now=now)  # type: ignore[arg-type]
        return {str(each.job.public_id): admission_state.expected(each) for each in heads}

    assert pool.database.run(read) == {long: 100.0, known: 10.0}


def test_sa_27_a_predictor_of_a_package_is_known_by_its_name_and_checked(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        def predict(self, ran: dict[str, list[float]]) -> dict[str, Prediction]:
            return dict.fromkeys(ran, Prediction(-1.0, 5.0))

    with pytest.raises(ValueError, match="'quantile' is not a predictor: there are 'quantiles'"):
        UpkeepSettings(predictor="quantile")
    ran(pool, pool.bot(capacity=9), "random", [1.0] * 5)
    monkeypatch.setattr(estimation, "load_predictor", {"theirs": Wrong()}.__getitem__)
    with pytest.raises(LeaseholdError, match=r"gave -1\.0"):
        estimation.predict(pool.database, "theirs")


def test_sa_27_where_no_job_has_a_class_no_job_is_read(pool: Pool) -> None:
    pool.submit(5)
    plan = pool.rows(
        "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) "
        + priority_classes.RECENT_RUN_TIMES.text.replace(":most", "5000")
    )
    jobs = [row[0] for row in plan if "jobs" in row[0]]
    assert jobs
    assert all("never executed" in line for line in jobs)
