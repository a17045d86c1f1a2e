"""The effect of a change: what it would do to whom, told by the code that makes it, and nothing done."""

from typing import Any

import httpx

from tests.support.pool import Pool

Figures = dict[tuple[str, str], tuple[float | None, float | None]]


def affected(http: httpx.Client, path: str, change: dict[str, Any], **query: str) -> Figures:
    """Instance and figure → what it is and what it would be."""
    answer = http.post(f"/v1/{path}/effect", json=change, params=query)
    assert answer.status_code == 200, answer.text
    assert answer.json()["left_out"] == 0
    return {(each["instance"], each["field"]): (each["before"], each["after"]) for each in answer.json()["affected"]}


def test_a_quota_tells_who_could_be_evicted_for_it_and_what_it_could_not_have(
    pool: Pool, operator: httpx.Client
) -> None:
    bot = pool.bot(capacity=3)
    operator.patch("/v1/quotas/default/small?create=true", json={"max": 5})
    pool.submit(2, instance="small")
    pool.assigner().run_once()
    bot.take()

    assert affected(operator, "quotas/default/large", {"min": 4, "max": 9}, create="true") == {
        ("large", "min"): (0, 4),
        ("large", "max"): (None, 9),
        ("large", "effective_max"): (None, 9),
        ("large", "room"): (None, 9),
        # One unit is free and two are above the minimum of the other.
        ("large", "capacity_gap"): (0, 1),
    }
    assert [each["instance"] for each in operator.get("/v1/quotas").json()["quotas"]] == ["small"]
    assert pool.rows("SELECT FROM instances WHERE name = 'large'") == []

    operator.patch("/v1/quotas/default/large?create=true", json={"min": 4, "max": 9})
    assert affected(operator, "quotas/default/small", {"min": 1, "max": 1}) == {
        ("small", "min"): (0, 1),
        ("small", "max"): (5, 1),
        ("small", "effective_max"): (5, 1),
        ("small", "room"): (3, 0),
        ("small", "over"): (0, 1),
        ("small", "opportunistic"): (2, 1),
        ("large", "reclaimable"): (2, 1),
        ("large", "capacity_gap"): (1, 2),
    }
    assert affected(operator, "quotas/default/small", {"max": 5}) == {}


def test_a_weight_tells_how_the_shares_of_all_change(pool: Pool, operator: httpx.Client) -> None:
    for name, weight in (("one", 1.0), ("three", 3.0)):
        operator.patch(f"/v1/instances/{name}", json={"credit_weight": weight})
    before = pool.rows("SELECT * FROM audit ORDER BY id")
    assert affected(operator, "instances/new", {"credit_weight": 4.0, "budget": 7.0}) == {
        ("new", "weight"): (None, 4),
        ("new", "share"): (None, 0.5),
        ("new", "budget"): (None, 7),
        ("one", "share"): (0.25, 0.125),
        ("three", "share"): (0.75, 0.375),
    }
    assert affected(operator, "instances/three", {"share": False}) == {
        ("three", "weight"): (3, None),
        ("three", "share"): (0.75, None),
        ("one", "share"): (0.25, 1),
    }
    assert pool.rows("SELECT * FROM audit ORDER BY id") == before
    assert [each["name"] for each in operator.get("/v1/accounts").json()["accounts"]] == ["one", "three"]


def test_what_the_change_would_be_refused_for_is_told_instead_of_an_effect(operator: httpx.Client) -> None:
    answer = operator.post("/v1/quotas/default/ci/effect?create=true", json={"min": 5, "max": 4})
    assert (answer.status_code, answer.json()["detail"]) == (400, "min: must not be more than the maximum of 4")
    assert operator.post("/v1/quotas/absent/ci/effect?create=true", json={"min": 5}).status_code == 404
    assert operator.post("/v1/quotas/default/ci/effect?create=true", json={"most": 5}).status_code == 422
