"""The console before 100,000 jobs and 500 bots: every page opens, and an act on 20,000 jobs can be stopped."""

import re
from functools import partial
from typing import Any

import pytest

from schema.accounting import accounts, quotas
from schema.accounting.accounts import Account
from schema.postgres.statements import Statement
from tests.support.filling import fill_bots, fill_jobs, fill_queues, occupy
from tests.support.screens.console import Console, Person

#: Instances i-0 to i-19 share 70,000 queued, 10,000 ended and 500 running jobs; i-20 has 20,000 jobs for the act.
INSTANCES, QUEUED, ENDED, BOTS, MANY = 20, 70_000, 10_000, 500, 20_000
PIECE = 5_000
ACTED = f"i-{INSTANCES}"


@pytest.fixture(scope="module")
def large(shown: Console) -> Console:
    """The console before a pool that is filled so."""

    def begin(connection: Any) -> None:
        fill_queues(connection, instances=INSTANCES + 1, kinds=["large"])
        fill_bots(connection, {"large": BOTS})
        occupy(connection, "large", leaving=0)
        for number in range(1, INSTANCES):
            name = f"i-{number}"
            quotas.set_quota(connection, "default", name, minimum=number, maximum=100, actor="test")
            accounts.put_account(connection, name, Account(credit_weight=float(number)), actor="test")

    run = shown.served.database.run
    run(begin)
    # Pieces that a busy machine fills within the time of a statement.
    for jobs, state, first, among in (
        (QUEUED, "queued", 0, INSTANCES),
        (ENDED, "succeeded", 0, INSTANCES),
        (MANY, "queued", INSTANCES, 1),
    ):
        piece = partial(fill_jobs, jobs=PIECE, instances=among, first=first, kinds=["large"], state=state)
        for _ in range(jobs // PIECE):
            run(piece)
    run(lambda connection: connection.execute(Statement("ANALYZE")))
    return shown


def rows(large: Console, statement: str) -> list[Any]:
    return large.served.database.run(lambda connection: list(connection.execute(Statement(statement))))


def test_every_page_opens_and_shows_what_it_should(person: Person, large: Console) -> None:
    (job,) = rows(large, "SELECT public_id FROM jobs WHERE state = 'running' ORDER BY id LIMIT 1")[0]
    person.log_in(large.operator)
    pages = person.page.locator("nav.top a").evaluate_all("links => links.map(a => [a.textContent, a.pathname])")
    seen = {
        "/": "td a:text-is('i-19')",
        "/jobs": "tbody tr:nth-child(50)",
        "/bots": "tbody tr:nth-child(100)",
        "/tenants": "tr:has-text('i-19') >> text=10.0%",
        f"/jobs/{job}": "dd:has-text('running')",
        "/bots/large-1": "dd:has-text('1 of 1')",
        f"/jobs?instance={ACTED}&state=queued&order=desc": f"td:text-is('{ACTED}')",
    }
    for name, path in [*pages, ("Job", f"/jobs/{job}"), ("Bot", "/bots/large-1"), ("Jobs", [*seen][-1])]:
        person.go(path)
        person.page.wait_for_selector(f"h1:text-is('{name}')")
        person.page.locator(seen.get(path, "main h1")).first.wait_for()
        assert person.page.inner_text(".problem") == "", path
    assert len(pages) >= 9


def test_the_list_of_jobs_is_left_page_by_page_with_a_key(person: Person, large: Console) -> None:
    person.log_in(large.operator)
    person.go("/jobs?instance=i-3")
    found: list[str] = []
    for page in range(3):
        person.page.wait_for_selector("tbody tr:nth-child(50)")
        found += person.page.locator("td a.id").all_inner_texts()
        if page < 2:
            person.page.locator("a:text-is('Next page')").wait_for()
            before = person.page.url
            person.page.keyboard.press("n")
            person.page.wait_for_url(lambda url, before=before: url != before)
    assert len(found) == len(set(found)) == 150


def test_an_act_on_20000_jobs_is_stopped_and_gone_on_with_and_each_job_is_changed_once(
    person: Person, large: Console
) -> None:
    person.log_in(large.operator)
    person.go(f"/jobs?instance={ACTED}")
    changed = []
    for verb in ("Stop", ""):
        person.page.click(".acts > button:text-is('Hold')")
        person.page.wait_for_selector(".question p:has-text('Hold 5,000+ jobs?')")
        person.page.click(".question .agree")
        if verb:
            person.page.wait_for_selector("text=changed so far")
            person.page.click("button:text-is('Stop')")
            told = person.page.wait_for_selector("text=/hold: stopped; .* are changed and stay so/").inner_text()
            changed.append(int(re.sub(r"\D", "", told)))
            assert rows(large, "SELECT count(*) FROM jobs WHERE state = 'parked'")[0][0] == changed[0]
        else:
            told = person.page.wait_for_selector("text=/hold: [0-9,]+ changed$/").inner_text()
            changed.append(int(re.sub(r"\D", "", told)))
    assert 0 < changed[0] < MANY
    assert sum(changed) == MANY
    events = "SELECT job_id, count(*) AS n FROM job_events WHERE to_state = 'parked' GROUP BY job_id"
    assert rows(large, f"SELECT count(*), max(n) FROM ({events}) e")[0] == (MANY, 1)


def test_a_submitter_sees_its_own_instance_of_a_large_pool_only(person: Person, large: Console) -> None:
    (foreign,) = rows(large, "SELECT j.public_id FROM jobs j JOIN instances i ON i.id = j.instance "
                             "WHERE i.name = 'i-4' ORDER BY j.id LIMIT 1")[0]  # fmt: skip
    person.log_in(large.served.token("submitter", instance="i-3"))
    assert person.sees("i-3")
    assert person.page.locator("table:has-text('instance') td:first-child a").all_inner_texts() == ["i-3"]
    for path in ("/jobs", "/jobs?instance=i-4"):
        person.go(path)
        person.page.locator("tbody tr, .problem:not(:empty), .note:not(:empty)").first.wait_for()
        assert set(person.page.locator("td:nth-child(3)").all_inner_texts()) <= {"i-3"}
    person.go(f"/jobs/{foreign}")
    person.page.wait_for_selector(".problem:has-text('there is no job')")
