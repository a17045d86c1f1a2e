"""The pages Health and Policy in a real browser, and the parts of them that are pure."""

from collections.abc import Iterator
from typing import Any

import pytest
from leasehold.calls.operators import Scores, Terms

from assigner.placement.decision_sample import DecisionSample, Seen, stored
from assigner.placement.registry import StrategySettings
from bots.console.operator_pages import health, policy
from bots.console.words import text
from schema import audit
from schema.postgres.statements import Statement
from schema.tenancy import drains, processes
from schema.tenancy.processes import Configuration, Kind
from tests.support.patience import MINUTE
from tests.support.screens.console import Console, console, left
from tests.support.servers import Databases

#: A name that would show, if a page took it for HTML, for an expression or for a template.
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>{{7*7}}${1}"
JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"
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
def page(context: Any, shown: Console) -> Iterator[Any]:
    """A page of an operator who is logged in. The browser may complain of nothing. The processes are alive."""
    shown.served.database.run(alive)
    made, complaints = context.new_page(), list[str]()
    made.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("dialog", lambda asked: complaints.append(asked.message))
    made.goto(shown.url + "/login")
    made.fill("#token", shown.operator)
    made.keyboard.press("Enter")
    made.wait_for_selector("h1:has-text('Pool')")
    yield made
    assert made.locator("img").count() == 0
    assert made.inner_text(".problem") == ""
    left(context)
    assert complaints == []


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
    assert '{"before": {"max": 1}}'.partition("{")[2] in row_of(page, HOSTILE)


def test_the_invariants_are_checked_when_somebody_asks_for_it(page: Any, shown: Console) -> None:
    page.goto(shown.url + "/health")
    row_of(page, "schema")
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
        for number in range(health.PAGE):
            audit.write(connection, "limit.set", actor="op", subject=f"subject-{number}")

    shown.served.database.run(write)
    page.goto(shown.url + "/health")
    row_of(page, f"subject-{health.PAGE - 1}")
    page.click("text=Older")
    page.wait_for_url("**before=**")
    assert HOSTILE in row_of(page, HOSTILE)
    assert page.get_by_text(f"subject-{health.PAGE - 1}", exact=True).count() == 0


def test_alerts_are_on_the_page_of_the_pool_too_but_not_for_submitters(
    page: Any, shown: Console, chromium: Any
) -> None:
    page.goto(shown.url + "/")
    assert "critical" in row_of(page, "LeaseholdUpkeepStands")
    context = chromium.new_context()
    theirs = context.new_page()
    theirs.set_default_timeout(MINUTE * 1000)
    theirs.goto(shown.url + "/login")
    theirs.fill("#token", shown.theirs)
    theirs.keyboard.press("Enter")
    theirs.wait_for_selector("h1:has-text('Pool')")
    theirs.wait_for_selector(".tile .value:not(:has-text('…'))")
    assert "LeaseholdUpkeepStands" not in theirs.inner_text("main")
    for path in ("/health", "/policy", "/policy?decision=1"):
        theirs.goto(shown.url + path)
        theirs.wait_for_selector(".problem:has-text('for operators')")
        assert "warm" not in theirs.inner_text("main")
    context.close()


def test_policy_shows_the_weights_in_force_their_file_and_why_a_change_was_refused(page: Any, shown: Console) -> None:
    page.goto(shown.url + "/policy")
    told = row_of(page, "/etc/leasehold/leasehold.toml")
    assert HOSTILE in told
    assert "5.25" in row_of(page, "assigner-7: [[assigners]] 0, priority-age")
    page.get_by_text("All settings").click()
    assert "30.5" in row_of(page, "timing.ttl")


def test_weights_are_tried_on_a_sampled_decision_and_shown_as_bars(page: Any, shown: Console) -> None:
    page.goto(shown.url + "/policy")
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


def terms(**given: float) -> Terms:
    values = {"priority": 0.0, "capacity": 0.0, "locality": 0.0, "success": 0.0} | given
    return Terms(total=sum(values.values()), **values)  # type: ignore[typeddict-item]


def test_positive_terms_lie_right_of_zero_and_negative_ones_left() -> None:
    found = terms(priority=-10.0, capacity=3.0, locality=5.0)
    assert policy.segments(found) == [("priority", 0.0, -10.0), ("capacity", 0.0, 3.0), ("locality", 3.0, 5.0)]
    assert policy.extent(found) == (-10.0, 8.0)
    assert policy.extent(terms()) == (0, 0)


def test_a_strategy_whose_choice_is_not_known_is_not_guessed() -> None:
    decision: Any = {"bot": "warm", "job": JOB, "at": "2026-01-01T00:00:00Z", "candidates": 2, "strategy": "pack"}
    found: Any = {"decision": decision, "chosen": None, "by_weights": False}
    assert "nobody can say" in policy.told(found)
    assert "The strategy pack does not choose by these scores." in policy.about(Scores(**found))


@pytest.mark.parametrize(
    ("finished", "rows", "said"),
    [(True, 0, "All 2 invariants hold"), (True, 3, "1 of 2 invariants are broken"), (False, 0, "Nothing is known")],
)
def test_a_check_of_the_invariants_is_one_sentence(finished: bool, rows: int, said: str) -> None:
    each: Any = [{"id": "S1", "rows": 0}, {"id": "S2", "rows": rows}]
    found: Any = {"finished": finished, "seconds": 0.5, "invariants": each if finished else []}
    assert health.verdict(found).startswith(said)


def test_settings_are_flat_and_a_mapping_is_shown_with_what_it_holds() -> None:
    settings = {"timing": {"ttl": 30}, "assigners": [{"kind": "cohort"}], "names": ["a"], "empty": {}}
    assert dict(policy.flat(settings)) == {
        "timing.ttl": 30, "assigners[0].kind": "cohort", "names": ["a"], "empty": {}
    }  # fmt: skip
    assert [text(value) for value in ({"a": 1}, {}, [], ["a"], 0, False, None, "")] == [
        '{"a": 1}', "-", "-", '["a"]', "0", "no", "-", "-"
    ]  # fmt: skip
