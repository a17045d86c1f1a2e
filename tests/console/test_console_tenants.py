"""The page of tenants in a browser: what is used beside what is due, and a change with the preview of its effect."""

from typing import Any

import httpx

from schema.timing import Timing
from tests.support.http import granted, submitted
from tests.support.screens.console import Console, Person
from tests.support.servers import Bot


def quotas(http: httpx.Client) -> dict[str, tuple[int, int | None]]:
    found = http.get("/v1/quotas").json()["quotas"]
    return {one["instance"]: (one["min_quota"], one["max_quota"]) for one in found}


def test_a_quota_is_changed_after_a_preview_of_whom_it_affects(person: Person, shown: Console) -> None:
    with shown.served.client(shown.operator) as http:
        http.patch("/v1/quotas/default/ours?create=true", json={"max": 5})
        http.patch("/v1/quotas/default/theirs?create=true", json={"min": 9})
        with shown.served.client(shown.ours) as ours:
            jobs = submitted(ours, *({"command": ["true"]} for _ in range(2)))
        Bot(shown.served, capacity=2)
        for job in jobs:
            granted(shown.served.database, Timing(), job)
        person.log_in(shown.operator)
        person.go("/tenants")
        person.page.click("td a:has-text('ours')")
        person.page.wait_for_selector("h2:has-text('Quota of ours in cohort default')")
        assert person.page.input_value("input[data-field=max]") == "5"
        person.page.fill("input[data-field=max]", "x")
        person.page.locator("button:has-text('Preview')").first.click()
        person.page.wait_for_selector(".problem:has-text(\"max: 'x' is not a number\")")
        person.page.fill("input[data-field=max]", "1")
        person.page.fill("input[data-field=min]", "1")
        person.page.locator("button:has-text('Preview')").first.click()
        person.page.wait_for_selector("tr:has-text('theirs'):has-text('may take from others for its minimum')")
        assert person.sees("2 instances would be affected.")
        assert quotas(http) == {"ours": (0, 5), "theirs": (9, None)}, "a preview changes nothing"
        person.page.locator("button:has-text('Change')").first.click()
        person.page.wait_for_selector(".question:has-text('Set min 1, max 1? 1 other instances are affected')")
        assert "ours starts nothing until 1 units are back" in person.page.inner_text(".question")
        person.page.click(".question .agree")
        assert person.sees("The change is made.")
        assert quotas(http) == {"ours": (1, 1), "theirs": (9, None)}


def test_a_share_is_given_and_taken_away(person: Person, shown: Console) -> None:
    def accounts(http: httpx.Client) -> dict[str, Any]:
        return {one["name"]: one["credit_weight"] for one in http.get("/v1/accounts").json()["accounts"]}

    with shown.served.client(shown.operator) as http:
        http.patch("/v1/instances/theirs", json={"credit_weight": 3.0})
        person.log_in(shown.operator)
        for typed, told, expected in (
            ("1", "Set credit weight 1", {"ours": 1.0, "theirs": 3.0}),
            ("", "Set share no", {"theirs": 3.0}),
        ):
            person.go("/tenants?instance=ours")
            person.page.fill("input[data-field=credit_weight]", typed)
            person.page.locator("button:has-text('Change')").last.click()
            person.page.wait_for_selector(f".question:has-text('{told}')")
            person.page.wait_for_selector("tr:has-text('theirs'):has-text('share that is due')")
            person.page.click(".question .agree")
            assert person.sees("The change is made.")
            assert accounts(http) == expected
        person.page.locator("button:has-text('Change')").last.click()
        person.page.wait_for_selector(".problem:has-text('nothing is changed')")
