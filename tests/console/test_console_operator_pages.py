"""The pages Health, Policy and Tenants in a real browser, and what is pure of them and of the charts."""

from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest
from leasehold.calls.operators import Scores, Terms

from assigner.placement.decision_sample import DecisionSample, Seen, stored
from assigner.placement.registry import StrategySettings
from schema import audit
from schema.postgres.statements import Statement
from schema.tenancy import drains, processes
from schema.tenancy.processes import Configuration, Kind
from schema.timing import Timing
from tests.support.http import granted, submitted
from tests.support.screens.console import Console, Person, console
from tests.support.servers import Bot, Databases

#: A name that would show, if a page took it for HTML, for an expression or for a template.
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>{{7*7}}${1}"
JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"
#: Rows of the audit on one page of the console.
PAGE = 50
CANDIDATES = [
    {"bot": "warm", "priority": 0, "free_units": 1, "capacity": 8, "hit": True, "rate": None},
    {"bot": "roomy", "priority": 0, "free_units": 4, "capacity": 8, "hit": False, "rate": None},
    {"bot": "last", "priority": 1, "free_units": 8, "capacity": 8, "hit": False, "rate": None},
]


def alive(connection: Any) -> None:
    """Let the processes give a sign of life, which counts for a minute."""
    drains.record_assigner_alive(connection, "assigner-7")
    processes.record_gateway_alive(connection, "g1:7411", url="http://g1:7411", figures={"queue": 3.0})


@pytest.fixture(scope="module")
def shown(databases: Databases, template: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A console on a pool with an assigner, a gateway, a sampled decision, and a row of the audit that is a script."""
    with console(databases, template, tmp_path_factory.mktemp("console") / "log") as running:
        seen = Seen.model_validate(
            {"units": 1, "label": HOSTILE, "locality_hint": "a", "of": 3, "candidates": CANDIDATES}
        )
        sample = stored(DecisionSample(JOB, "warm", StrategySettings(), seen))
        strategy = StrategySettings(weights={"locality": 5.25}).model_dump(mode="json")
        settings = {"assigners": [{"kind": "priority-age", "strategy": strategy}], "timing": {"ttl": 30.5}}
        told = Configuration("/etc/leasehold/leasehold.toml", settings, f"threads: {HOSTILE}")

        def arrange(connection: Any) -> None:
            alive(connection)
            processes.record_configuration(connection, Kind.ASSIGNER, "assigner-7", told)
            processes.record_decision(connection, "assigner-7", **sample)
            audit.write(connection, "limit.set", actor="op", subject=HOSTILE, details={"before": {"max": 1}})

        running.served.database.run(arrange)
        yield running


@pytest.fixture
def page(person: Person, shown: Console) -> Iterator[Any]:
    """The page of an operator, who logs in. No page takes text for HTML or has a problem. The processes are alive."""
    shown.served.database.run(alive)
    person.log_in(shown.operator)
    yield person.page
    assert person.page.locator("img").count() == 0
    assert person.page.inner_text(".problem") == ""


def row_of(page: Any, words: str) -> str:
    """Wait for the row of a table that has these words, and return its text."""
    row = page.locator("tr", has=page.get_by_text(words, exact=True)).first
    row.wait_for()
    found: str = row.inner_text()
    return found


def test_health_shows_alerts_with_what_to_do_checks_processes_and_the_audit(page: Any, shown: Console) -> None:
    page.goto(shown.url + "/health")
    stands = row_of(page, "LeaseholdUpkeepStands")
    assert "critical" in stands
    assert "Look at the logs of leasehold assign" in stands
    refused = row_of(page, "LeaseholdConfigurationIsRefused")
    assert HOSTILE in refused
    assert "leasehold config check" in refused
    assert "running" in row_of(page, "assigner-7")
    assert "3 in work" in row_of(page, "g1:7411")
    assert "ok" in row_of(page, "schema")
    assert "before max 1" in row_of(page, HOSTILE)
    # The invariants are checked when somebody asks for it.
    page.get_by_role("button", name="Check the invariants").focus()
    page.keyboard.press("Enter")
    page.get_by_text("invariants hold").wait_for()
    assert not page.get_by_text("What breaks an invariant").is_visible()

    overlap = "('2026-01-01 00:00Z', 'pool', 600), ('2026-01-01 00:01Z', 'pool', 60)"
    overlap = f"INSERT INTO pool_samples (at, scope, span) VALUES {overlap}"
    shown.served.database.run(lambda c: c.execute(Statement(overlap)))
    page.get_by_role("button", name="Check the invariants").click()
    page.get_by_text("That is a defect.").wait_for()
    assert "pool/" in row_of(page, "S29")
    shown.served.database.run(lambda c: c.execute(Statement("DELETE FROM pool_samples")))


def test_older_rows_of_the_audit_are_on_a_page_of_their_own(page: Any, shown: Console) -> None:
    def write(connection: Any) -> None:
        for number in range(PAGE):
            audit.write(connection, "limit.set", actor="op", subject=f"subject-{number}")

    shown.served.database.run(write)
    page.goto(shown.url + "/health")
    row_of(page, f"subject-{PAGE - 1}")
    page.click("text=Older")
    page.wait_for_url("**before=**")
    assert HOSTILE in row_of(page, HOSTILE)
    assert page.get_by_text(f"subject-{PAGE - 1}", exact=True).count() == 0


def test_alerts_are_on_the_page_of_the_pool_too_but_not_for_submitters(person: Person, shown: Console) -> None:
    person.log_in(shown.operator, "/")
    assert "critical" in row_of(person.page, "LeaseholdUpkeepStands")
    person.log_in(shown.theirs, "/")
    person.page.wait_for_selector(".tile .value:not(:has-text('…'))")
    assert "LeaseholdUpkeepStands" not in person.page.inner_text("main")
    with shown.client(shown.theirs) as http:
        for path in ("/health", "/policy?decision=1", "/bots"):
            answer = http.get(path).text
            assert "for operators" in answer
            assert "warm" not in answer


def test_policy_shows_weights_in_force_and_why_a_change_was_refused_and_tries_others(page: Any, shown: Console) -> None:
    for reason in (HOSTILE, "slower"):
        with httpx.Client(base_url=shown.served.url, headers={"Authorization": f"Bearer {shown.operator}"}) as http:
            body = {"per_second": len(reason), "reason": reason}
            assert http.put("/v1/rates/cli", json=body).status_code == 200
    page.goto(shown.url + "/policy")
    told = row_of(page, "/etc/leasehold/leasehold.toml")
    assert row_of(page, "slower").split()[:3] == ["2", "in", "force"]
    assert HOSTILE in told
    assert "5.25" in row_of(page, "assigner-7: [[assigners]] 0, priority-age")
    page.get_by_text("All settings").click()
    assert "30.5" in row_of(page, "timing.ttl")
    # Weights are tried on a sampled decision and shown as bars.
    page.get_by_text("With these weights the job goes to warm too.").wait_for()
    assert page.get_attribute("input[data-field=locality]", "placeholder") == "5"
    assert page.locator(".bars svg").count() == 3
    page.fill("input[data-field=locality]", "1")
    page.get_by_role("button", name="Try these weights").click()
    page.get_by_text("With these weights the job goes to roomy, not to warm.").wait_for()
    assert page.inner_text(".bars span >> nth=0") == "roomy (takes the job)"
    bars = page.get_attribute(".bars svg >> nth=1", "aria-label")
    assert bars == "warm: tried 2 (capacity +1, locality +1); decided 6 (capacity +1, locality +5)"
    page.select_option("select[data-field=capacity_term]", "normalised")
    page.get_by_role("button", name="Try these weights").click()
    page.get_by_text("With these weights the job goes to warm too.").wait_for()
    page.fill("input[data-field=locality]", "one")
    page.get_by_role("button", name="Try these weights").click()
    page.wait_for_selector(".problem:has-text('locality: is not a number')")
    page.fill("input[data-field=locality]", "")
    page.get_by_role("button", name="Try these weights").click()
    page.wait_for_selector(".problem:empty", state="attached")


# What is pure


@pytest.fixture(scope="module")
def pages() -> SimpleNamespace:
    """Modules of the console. They load the framework, for which nobody waits who does not ask for them."""
    names = {
        "health": "operator_pages.health",
        "policy": "operator_pages.policy",
        "words": "words",
        "charts": "charts",
        "graph_drawing": "graph_drawing",
    }
    return SimpleNamespace(**{name: import_module(f"bots.console.{place}") for name, place in names.items()})


def test_a_trial_is_told_in_a_sentence(pages: SimpleNamespace) -> None:
    trial: dict[str, Any] = {
        "policy": 8, "kind": "cohort", "names": ["a", "b"], "reached": ["a"], "step": 0, "steps": [1, 2],
        "step_at": "2026-01-01T00:00:00Z", "outcome": None, "guards": [{"guard": "p95_wait<=1.2x", "holds": None}],
    }  # fmt: skip
    told = pages.policy.told_of_canary
    assert told(trial) == (
        "Version 8 is tried on 1 of 2 cohorts, step 1 of 2 since 2026-01-01 00:00:00 UTC: "
        "p95_wait<=1.2x is not known yet."
    )
    ended = {**trial, "outcome": "returned", "why": "p95_wait<=1.2x: 9, at most 2"}
    assert told(ended) == "Version 8 was tried on 1 of 2 cohorts, and returned: p95_wait<=1.2x: 9, at most 2."


def terms(**given: float) -> Terms:
    values = {"priority": 0.0, "capacity": 0.0, "locality": 0.0, "success": 0.0} | given
    return Terms(total=sum(values.values()), **values)  # type: ignore[typeddict-item]


def test_positive_terms_lie_right_of_zero_and_negative_ones_left(pages: Any) -> None:
    found = terms(priority=-10.0, capacity=3.0, locality=5.0)
    assert pages.policy.segments(found) == [("priority", 0.0, -10.0), ("capacity", 0.0, 3.0), ("locality", 3.0, 5.0)]
    assert pages.policy.extent(found) == (-10.0, 8.0)
    assert pages.policy.extent(terms()) == (0, 0)


def test_a_strategy_whose_choice_is_not_known_is_not_guessed(pages: Any) -> None:
    decision: Any = {"bot": "warm", "job": JOB, "at": "2026-01-01T00:00:00Z", "candidates": 2, "strategy": "pack"}
    found: Any = {"decision": decision, "chosen": None, "by_weights": False}
    assert "nobody can say" in pages.policy.told(found)
    assert "The strategy pack does not choose by these scores." in pages.policy.about(Scores(**found))


def test_a_check_of_the_invariants_is_one_sentence(pages: Any) -> None:
    for finished, rows, said in (
        (True, 0, "All 2 invariants hold"),
        (True, 3, "1 of 2 invariants are broken"),
        (False, 0, "Nothing is known"),
    ):
        each: Any = [{"id": "S1", "rows": 0}, {"id": "S2", "rows": rows}]
        found: Any = {"finished": finished, "seconds": 0.5, "invariants": each if finished else []}
        assert pages.health.verdict(found).startswith(said)


def test_an_alert_leads_to_its_jobs_and_times_of_charts_are_of_a_zone_with_its_name(pages: Any) -> None:
    for name, subject, path in (
        ("InstanceAtMaximum", "gpu/a b", "/jobs?state=running&state=leased&cohort=gpu&instance=a%20b"),
        ("InstanceAtMaximum", "", "/tenants"),
        ("JobsThatNobodyCanRun", "", "/jobs?unmatchable=true"),
        ("JobsWaitLong", "", "/jobs?state=queued&sort=queued&order=asc"),
        ("UpkeepStands", "", None),
    ):
        assert pages.health.place({"name": f"Leasehold{name}", "subject": subject}) == path
    zones = {"UTC": "UTC", "Europe/Berlin": "CET", "America/Sao_Paulo": "UTC-03"}
    assert {zone: pages.charts.zone_name(1772366400, ZoneInfo(zone)) for zone in zones} == zones


def test_settings_are_flat_and_a_mapping_is_shown_with_what_it_holds(pages: Any) -> None:
    settings = {"timing": {"ttl": 30}, "assigners": [{"kind": "cohort"}], "names": ["a"], "empty": {}}
    assert dict(pages.policy.flat(settings)) == {
        "timing.ttl": 30, "assigners[0].kind": "cohort", "names": ["a"], "empty": {}
    }  # fmt: skip
    assert [pages.words.text(value) for value in ({"a": 1}, {}, [], ["a"], 0, False, None, "")] == [
        "a 1", "-", "-", "a", "0", "no", "-", "-"
    ]  # fmt: skip


# Tenants: what is used beside what is due, and a change with the preview of its effect


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
        person.log_in(shown.operator, "/tenants")
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
        person.page.wait_for_selector(".question:has-text('Set min 1, max 1? 1 other instance is affected')")
        assert "ours starts nothing until 1 unit is back" in person.page.inner_text(".question")
        person.page.click(".question .agree")
        assert person.sees("The change is made.")
        assert quotas(http) == {"ours": (1, 1), "theirs": (9, None)}


def test_a_share_is_given_and_taken_away(person: Person, shown: Console) -> None:
    def accounts(http: httpx.Client) -> dict[str, Any]:
        return {one["name"]: one["weight"] for one in http.get("/v1/accounts").json()["accounts"]}

    with shown.served.client(shown.operator) as http:
        http.patch("/v1/instances/theirs", json={"weight": 3.0})
        person.log_in(shown.operator)
        for typed, told, expected in (
            ("1", "Set weight 1", {"ours": 1.0, "theirs": 3.0}),
            ("", "Set share no", {"theirs": 3.0}),
        ):
            person.go("/tenants?instance=ours")
            person.page.fill("input[data-field=weight]", typed)
            person.page.locator("button:has-text('Change')").last.click()
            person.page.wait_for_selector(f".question:has-text('{told}')")
            person.page.wait_for_selector("tr:has-text('theirs'):has-text('share that is due')")
            person.page.click(".question .agree")
            assert person.sees("The change is made.")
            assert accounts(http) == expected
        person.page.locator("button:has-text('Change')").last.click()
        person.page.wait_for_selector(".problem:has-text('nothing is changed')")


def sample(at: float, span: int = 60, **fields: Any) -> dict[str, Any]:
    moment = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    return {"at": moment, "span": span, "waiting": 0, "failed": 0, "oldest_wait": None} | fields


def test_samples_that_share_a_place_become_one_point(pages: Any) -> None:
    points, most = pages.charts.points, pages.charts.MAX_POINTS
    hour = 3600.0
    crowded = [sample(60 * n, waiting=n, failed=2) for n in range(24 * 60)]
    line = points(crowded, "waiting", start=0, end=24 * hour)
    assert len(line) == most
    assert [value for _, value in line[:2]] == [5, 11]
    assert {value for _, value in points(crowded, "failed", start=0, end=24 * hour)} == {2}
    assert points([sample(0, span=600, failed=30)], "failed", start=0, end=hour)[0][1] == 3
    assert points([sample(0), sample(hour), sample(-1)], "oldest_wait", start=0, end=hour) == [(0.5 / most, 0)]


def test_a_time_without_samples_is_a_gap_in_the_line(pages: Any) -> None:
    line = [(0.0, 1.0), (0.1, 2.0), (0.5, 3.0)]
    assert pages.charts.parts(line, gap=0.2) == [line[:2], line[2:]]
    assert pages.charts.parts([], gap=0.2) == []


def test_the_side_of_a_chart_has_round_figures(pages: Any) -> None:
    figures = {0: 4, 4: 4, 5: 8, 9: 10, 101: 200, 350: 400, 999: 1000}
    assert {largest: pages.charts.scale(largest) for largest in figures} == figures


def test_nodes_of_a_graph_stand_in_levels_and_beside_what_they_wait_for(pages: Any) -> None:
    drawing = pages.graph_drawing
    places = drawing.placed({1: 0, 2: 0, 3: 1, 4: 1}, {1: [], 2: [], 3: [2], 4: [1]})
    column = drawing.WIDTH + drawing.BETWEEN
    assert [places[number][0] // column for number in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert (places[1][1], places[2][1]) == (places[4][1], places[3][1])


def test_raw_values_become_words(pages: Any) -> None:
    text = pages.words.text
    assert text({"used": 2.0, "most": None}) == "used 2, most none"
    assert (text(["gpu-small", "cpu"]), text(2**31 - 1), text([])) == ("gpu-small, cpu", "no limit", "-")
    told = [pages.words.ago("2026-03-01T12:00:00Z", now=1772366400 + passed).text for passed in (1, 59, 7300, -90)]
    assert told == ["now", "59 s ago", "2 h ago", "in 1 min"]
