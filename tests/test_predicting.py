"""Predicted durations: from the jobs of a class that ran last, for slack and for the order."""

import pytest

from assigner import books, predicting
from assigner.predicting import Quantiles
from assigner.upkeep import UpkeepSettings
from schema import classes, gated
from schema.errors import LeaseholdError
from schema.predictions import Prediction
from schema.ready import Scope
from schema.requests import JobRequest
from tests.pool import Bot, Pool, completed


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
    predicting.predict(pool.database, "quantiles")
    known = {each.name: (each.seconds, each.seconds_high) for each in pool.database.run(classes.classes)}
    median, high = known["random"]
    assert (median, high) == (pytest.approx(5.5), pytest.approx(18.1))
    assert known["serious"] == (None, None), "four are not enough"
    before = pool.row("SELECT xmin FROM job_classes WHERE name = 'random'").xmin
    predicting.predict(pool.database, "quantiles")
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
        found = gated.queues(connection, Scope(None), batch=9, start=0.5, after=gated.BEGINNING)  # type: ignore[arg-type]
        book = books.opened(connection, found.queues, now=now, rules=books.RULES)  # type: ignore[arg-type]
        heads = gated.heads(connection, found.queues, limits=[9] * len(found.queues), now=now)  # type: ignore[arg-type]
        return {str(each.job.public_id): book.expected(each) for each in heads}

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
    monkeypatch.setattr(predicting, "load", {"theirs": Wrong()}.__getitem__)
    with pytest.raises(LeaseholdError, match=r"gave -1\.0"):
        predicting.predict(pool.database, "theirs")


def test_sa_27_where_no_job_has_a_class_no_job_is_read(pool: Pool) -> None:
    pool.submit(5)
    plan = pool.rows(
        "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) "
        + predicting.predictions.RAN.text.replace(":most", "5000")
    )
    jobs = [row[0] for row in plan if "jobs" in row[0]]
    assert jobs
    assert all("never executed" in line for line in jobs)
