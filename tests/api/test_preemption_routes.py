"""The log of preemptions over HTTP: what a row says, pages, and jobs that were deleted since."""

import httpx

from tests.support.pool import Pool, completed
from tests.support.tenancy import Tenancy, assign, contested


def test_a_preemption_is_listed_with_its_receipt(pool: Pool, tenancy: Tenancy, operator: httpx.Client) -> None:
    victim, wanting, bot, work = contested(pool, tenancy)
    assign(pool)
    assert operator.get("/v1/preemptions").json() == {"preemptions": []}, "it is only asked to stop"
    bot.sync(completed(work, "stopped"))

    (one,) = operator.get("/v1/preemptions").json()["preemptions"]

    names = {name: one[name] for name in ("instance", "job", "bot", "preemptor_instance", "cohort")}
    assert names == {
        "instance": "team-b",
        "job": victim,
        "bot": "bot-1",
        "preemptor_instance": "team-a",
        "cohort": "default",
    }
    assert one["rule"] == one["receipt"]["rule"]
    assert one["receipt"]["preemptor"]["job"] == wanting
    assert [each["job"] for each in one["receipt"]["victims"]] == [victim]


def test_preemptions_come_in_pages_and_outlive_their_jobs(pool: Pool, tenancy: Tenancy, operator: httpx.Client) -> None:
    tenancy.quota("team-a", minimum=1)
    for age in range(5):
        tenancy.evicted("team-a", age=100 - age)

    first = operator.get("/v1/preemptions", params={"limit": 3}).json()["preemptions"]
    rest = operator.get("/v1/preemptions", params={"limit": 3, "before": first[-1]["id"]}).json()["preemptions"]

    ids = [one["id"] for one in first + rest]
    assert (len(first), len(rest)) == (3, 2)
    assert ids == sorted(ids, reverse=True)
    assert {(one["job"], one["bot"], one["instance"]) for one in first + rest} == {(None, None, "team-a")}
    assert operator.get("/v1/preemptions", params={"before": 0}).status_code in (400, 422)
