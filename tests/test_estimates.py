"""What a job is expected to use, where whoever submits it does not say."""

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import httpx
import pytest

from assigner import estimates, plugins
from assigner.estimates import EstimateSettings
from schema.errors import LeaseholdError
from schema.requests import JobRequest
from tests.pool import Pool
from tests.serving import Served


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
    assert estimates.usage(request(**fields)) == expected


def test_sa_24_nothing_is_guessed_unless_it_is_asked_for_or_if_the_job_says_so_itself() -> None:
    assert EstimateSettings().estimate is None
    assert "estimated_cost" not in estimates.with_estimate(request(), None)
    told = estimates.with_estimate(request(estimated_cost=0.5), EstimateSettings(estimator="usage").estimate)
    assert told["estimated_cost"] == 0.5
    with pytest.raises(ValueError, match="'usag' is not an estimator: there are 'usage'; did you mean 'usage'"):
        EstimateSettings(estimator="usag")


def test_sa_24_a_package_may_guess_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {"seven": "tests.test_estimates:seven", "wrong": "tests.test_estimates:wrong", "absent": "tests:absent"}
    found = EntryPoints(EntryPoint(name, place, estimates.GROUP) for name, place in offered.items())
    monkeypatch.setattr(plugins, "entry_points", lambda **which: found.select(**which))
    made = EstimateSettings(estimator="seven").estimate
    assert estimates.with_estimate(request(), made)["estimated_cost"] == 7
    with pytest.raises(LeaseholdError, match="estimator 'wrong' gave -1"):
        estimates.load("wrong")(request())
    with pytest.raises(ValueError, match=r"'absent' \(tests:absent\) cannot be loaded: AttributeError"):
        estimates.load("absent")


def test_a_36_what_is_guessed_is_written_at_the_submit_and_stays(
    served: Served, operator: httpx.Client, pool: Pool
) -> None:
    served.app.state.estimate = estimates.usage
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
