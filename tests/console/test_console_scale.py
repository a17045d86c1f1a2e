"""The console before many jobs and bots: every list opens, and an act on thousands of jobs can be stopped."""

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from nicegui import Client, ui

from bots.console import parts
from schema.accounting import accounts, quotas
from schema.accounting.accounts import Account
from schema.postgres.statements import Statement
from tests.support.filling import fill_bots, fill_jobs, fill_queues, occupy
from tests.support.screens.console import Console, Person

#: Instances i-0 to i-19 share the queued and ended jobs, and as many run as there are bots. i-20 has the jobs for the
#: act, more than the console counts.
INSTANCES, QUEUED, ENDED, BOTS, MANY = 20, 2_000, 1_000, 150, 6_000
PIECE = 1_000
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
            accounts.put_account(connection, name, Account(weight=float(number)), actor="test")

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


@contextmanager
def held_half_way(large: Console) -> Iterator[None]:
    """Have whoever acts on the jobs of the act wait for one in their middle, until the block is left."""
    acted = f"(SELECT id FROM instances WHERE name = '{ACTED}')"
    middle = f"SELECT id FROM jobs WHERE instance = {acted} ORDER BY id LIMIT 1 OFFSET {MANY // 2} FOR UPDATE"
    with large.served.database.begin() as connection:
        connection.execute(Statement("SET LOCAL idle_in_transaction_session_timeout = 0"))
        assert len(list(connection.execute(Statement(middle)))) == 1
        yield


def test_every_list_opens_and_shows_what_it_should(person: Person, large: Console) -> None:
    (job,) = rows(large, "SELECT public_id FROM jobs WHERE state = 'running' ORDER BY id LIMIT 1")[0]
    person.log_in(large.operator)
    for path, name, seen in (
        ("/", "Pool", "td a:text-is('i-19')"),
        ("/bots", "Bots", "tbody tr:nth-child(100)"),
        ("/tenants", "Tenants", "tr:has-text('i-19') >> text=10.0%"),
        (f"/jobs/{job}", "", ".lead .badge:has-text('running')"),
        ("/bots/large-1", "", "dd:has-text('1 of 1')"),
        (f"/jobs?instance={ACTED}&state=queued&order=desc", "Jobs", f"td:text-is('{ACTED}')"),
    ):
        person.go(path)
        person.page.wait_for_selector(f"h1:has-text('{name}')")
        person.page.locator(seen).first.wait_for()
        assert person.page.inner_text(".problem") == "", path


def test_an_act_on_many_jobs_is_stopped_and_goes_on_and_changes_each_once(person: Person, large: Console) -> None:
    person.log_in(large.operator, f"/jobs?instance={ACTED}")
    changed = []
    # How many are left the second time depends on when it was stopped.
    for verb, asked in (("Stop", r"Hold 5,000\+ jobs\?"), ("", r"Hold [0-9,]+\+? jobs?\?")):
        person.page.click(".acts > button:text-is('Hold')")
        person.page.locator(".question p").filter(has_text=re.compile(asked)).wait_for()
        if verb:
            with held_half_way(large):
                person.page.click(".question .agree")
                person.page.wait_for_selector("text=changed so far")
                person.page.click("button:text-is('Stop')")
            told = person.page.wait_for_selector("text=/hold: stopped; .* are changed and stay so/").inner_text()
            changed.append(int(re.sub(r"\D", "", told)))
            assert rows(large, "SELECT count(*) FROM jobs WHERE state = 'parked'")[0][0] == changed[0]
        else:
            person.page.click(".question .agree")
            told = person.page.wait_for_selector("text=/hold: [0-9,]+ changed$/").inner_text()
            changed.append(int(re.sub(r"\D", "", told)))
    assert 0 < changed[0] < MANY
    assert sum(changed) == MANY
    events = "SELECT job_id, count(*) AS n FROM job_events WHERE to_state = 'parked' GROUP BY job_id"
    assert rows(large, f"SELECT count(*), max(n) FROM ({events}) e")[0] == (MANY, 1)


def test_a_command_of_many_options_is_two_elements_and_stays_the_text_that_it_is() -> None:
    told = "cc <script>alert(1)</script> &amp; --queue-timeout=1 -o 'a' -DNDEBUG \"x\" -c " + "-Wall " * 60
    with Client(ui.page("/")) as page:
        before = len(page.elements)
        cell = parts.node("td", told)
        with cell:
            parts.node("small", "more")
        assert len(page.elements) - before == 3
        words, more = cell.default_slot.children
        written = words.props["innerHTML"]
        assert set(re.findall("<[^>]*>", written)) == {'<span class="option">', "</span>"}
        assert html.unescape(re.sub("<[^>]*>", "", written)) == told
        cell.text = "-n & more"
        assert cell.default_slot.children == [words, more]
        assert words.props["innerHTML"] == '<span class="option">-n</span> &amp; more'
        cell.text = "plain"
        assert cell.default_slot.children == [more]
        cell.text = "again -n"
        assert cell.default_slot.children[1] is more
