"""The console in a real browser: what a person sees and does, with each kind of token."""

from typing import Any

import pytest

from schema import readable
from tests.support.http import submitted
from tests.support.patience import eventually
from tests.support.screens.console import Console, Person
from tests.support.servers import Bot

#: Seconds between two looks of a list.
LOOK = 5
#: A label that would show, if a page took it for HTML, for an expression or for a template.
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>{{7*7}}${1}"


@pytest.fixture(scope="module")
def jobs(shown: Console) -> dict[str, str]:
    """A job of each of two instances, one of them with a label that is a script."""
    found = {}
    for name, token, label in (("ours", shown.ours, HOSTILE), ("theirs", shown.theirs, "of theirs")):
        with shown.served.client(token) as http:
            (found[name],) = submitted(http, {"command": ["echo", HOSTILE], "label": label, "metadata": {"team": name}})
    Bot(shown.served)
    return found


def test_a_wrong_token_is_refused_and_a_right_one_shows_the_pool(person: Person, shown: Console, jobs: Any) -> None:
    person.go("/login")
    person.page.fill("#token", shown.operator[:-1])
    person.page.keyboard.press("Enter")
    person.page.wait_for_selector(".problem:not(:empty)")
    assert "no valid token" in person.page.inner_text(".problem")
    assert person.page.context.cookies() == []
    # The browser itself notes the status of this answer.
    assert [said for said in person.complaints if "401" not in said] == []
    person.complaints.clear()
    person.page.fill("#token", shown.operator)
    person.page.keyboard.press("Enter")
    person.page.wait_for_selector("h1:has-text('Pool')")
    assert person.sees("theirs")
    person.page.click("text=Log out")
    person.page.wait_for_url("**/login")
    person.go("/jobs")
    assert person.page.url.endswith("/login")


def test_a_label_that_is_a_script_stays_text(person: Person, shown: Console, jobs: dict[str, str]) -> None:
    person.log_in(shown.operator)
    short = readable.short_ids([jobs["ours"]])[0]
    for path in (f"/jobs/{jobs['ours']}", "/jobs?instance=ours", f"/jobs?q={short}"):
        person.go(path)
        assert person.sees(HOSTILE)
        assert person.page.locator("img").count() == 0
        assert person.page.title() in ("Job – Leasehold", "Jobs – Leasehold")
    # An id in short leads to its job.
    person.page.wait_for_url(f"**/jobs/{jobs['ours']}")


def test_a_submitter_sees_its_own_instance_only(person: Person, shown: Console, jobs: dict[str, str]) -> None:
    person.log_in(shown.theirs, "/")
    assert person.sees("theirs")
    assert "ours" not in person.page.inner_text("main")
    person.go("/jobs")
    person.page.wait_for_selector(f"a[title='{jobs['theirs']}']")
    assert person.page.locator(f"a[title='{jobs['ours']}']").count() == 0
    person.go(f"/jobs/{jobs['ours']}")
    person.page.wait_for_selector(".problem:not(:empty)")
    assert "there is no job" in person.page.inner_text(".problem")
    assert HOSTILE not in person.page.inner_text("main")
    assert "It has written nothing" not in person.page.inner_text("main"), "nothing is known of that job"
    person.go("/graphs/theirs")
    person.page.wait_for_selector(".problem:has-text('there is no graph')")
    assert not person.page.is_visible("text=Cancel the graph")


def test_of_a_graph_that_is_too_large_to_be_drawn_bad_nodes_come_first(person: Person, shown: Console) -> None:
    nodes = [{"node": number, "command": ["true"]} for number in range(405)]
    with shown.served.client(shown.ours) as http:
        made = http.post("/v1/graphs", json={"name": "large", "nodes": nodes}).json()
        http.post("/v1/jobs/cancel", json={"ids": [made["nodes"][404]["id"]]})
    person.log_in(shown.ours, "/graphs/large")
    assert person.sees("200 of 405 nodes, those that ended badly first. leasehold graph show tells of all.")
    rows = person.page.locator("tbody tr")
    assert [rows.nth(place).locator("td").nth(0).inner_text() for place in (0, 1, 199)] == ["404", "0", "198"]


def test_the_filter_is_in_the_url_and_a_page_follows_the_other(person: Person, shown: Console) -> None:
    with shown.served.client(shown.ours) as http:
        submitted(http, *({"command": ["true"], "label": "many"} for _ in range(51)))
    person.log_in(shown.operator, "/jobs")
    person.page.fill("input[name=q]", "label:many state:queued")
    person.page.click("button:has-text('Filter')")
    person.page.wait_for_selector("tbody tr:nth-child(50)")
    assert {"label=many", "state=queued"} <= set(person.page.url.partition("?")[2].split("&"))
    assert person.page.input_value("input[name=q]") == "state:queued label:many"
    assert person.page.inner_text(".tabs [aria-current]") == "queued"
    person.page.locator("a:text-is('Next page')").wait_for()
    person.page.keyboard.press("n")
    person.page.wait_for_url("**cursor=**")
    person.page.wait_for_selector("tbody tr")
    assert person.page.locator("tbody tr").count() == 1
    person.go("/jobs?min_priority=x")
    person.page.wait_for_selector(".problem:not(:empty)")
    assert "min_priority" in person.page.inner_text(".problem")
    person.page.click("a:has-text('min_priority: x')")
    person.page.wait_for_url("**/jobs")
    person.page.fill("input[name=q]", "colour:red")
    person.page.keyboard.press("Enter")
    person.page.wait_for_selector(".problem:has-text(\"search: there is no field 'colour'\")")
    assert person.page.input_value("input[name=q]") == "colour:red"
    # What is typed into a field is no key of the page.
    person.page.keyboard.press("/")
    person.page.keyboard.press("End")
    person.page.keyboard.type("g?")
    assert person.page.locator("input:focus").input_value() == "colour:redg?"
    assert person.page.locator("dialog[open]").count() == 0


def test_a_job_is_cancelled_with_the_keyboard_after_a_question(person: Person, shown: Console) -> None:
    with shown.served.client(shown.ours) as http:
        (job,) = submitted(http, {"command": ["true"]})
        person.log_in(shown.ours, f"/jobs/{job}")
        assert person.sees("queued")
        button = person.page.locator("button:has-text('Cancel the job')").first
        button.focus()
        person.page.keyboard.press("Enter")
        person.page.wait_for_selector(".question")
        assert job in person.page.inner_text(".question")
        person.page.keyboard.press("Escape")
        person.page.wait_for_selector(".question", state="detached")
        assert http.get(f"/v1/jobs/{job}").json()["state"] == "queued"
        button.focus()
        person.page.keyboard.press("Enter")
        person.page.wait_for_selector(".question")
        person.page.locator(".question .agree").focus()
        person.page.keyboard.press("Enter")
        person.page.wait_for_selector(".lead .badge:has-text('cancelled')")
        assert http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled"


def test_all_jobs_that_pass_the_filter_are_counted_confirmed_and_changed(person: Person, shown: Console) -> None:
    with shown.served.client(shown.ours) as http:
        jobs = submitted(http, *({"command": ["true"], "label": "bulk"} for _ in range(12)))
    # A list of known labels has those of waiting jobs, also of jobs that are not on the page.
    person.log_in(shown.operator, "/jobs?label=none")
    person.page.locator("select[aria-label=label] option:text-is('bulk')").wait_for(state="attached")
    person.go("/jobs?label=bulk")
    person.page.fill("input[data-field=reason]", "a test")
    for verb, state in (("Hold", "parked"), ("Release", "queued"), ("Priority", "queued")):
        if verb == "Priority":
            person.page.click(f".acts > button:has-text('{verb}')")
            person.page.wait_for_selector(".problem:has-text('priority: is not a number')")
            person.page.fill("input[data-field=priority]", "7")
        person.page.click(f".acts > button:has-text('{verb}')")
        person.page.wait_for_selector(f".question p:has-text('{verb} 12 jobs')")
        person.page.click(".question .agree")
        person.page.wait_for_selector(f"text={verb.lower()}: 12 changed")
        with shown.served.client(shown.operator) as http:
            job = http.get(f"/v1/jobs/{jobs[0]}").json()
        assert job["state"] == state
        assert job["events"][-1]["details"]["reason"] == "a test"
    assert job["priority"] == 7
    for place in (1, 2):
        person.page.check(f"tbody tr:nth-child({place}) input")
    person.page.click(".acts > button:has-text('Cancel')")
    person.page.wait_for_selector(".question p:has-text('Cancel 2 chosen jobs?')")
    person.page.click(".question .agree")
    person.page.wait_for_selector("text=cancel: 2 changed")
    with shown.served.client(shown.operator) as http:
        states = [http.get(f"/v1/jobs/{job}").json()["state"] for job in reversed(jobs)]
    assert states == ["cancelled"] * 2 + ["queued"] * 10


def test_what_a_person_is_told_stays_when_the_page_looks_and_goes_with_an_act(person: Person, shown: Console) -> None:
    with shown.served.client(shown.ours) as http:
        submitted(http, {"command": ["true"], "label": "told"})
        person.log_in(shown.ours, "/jobs?label=told")
        person.page.wait_for_selector("tbody tr")
        person.page.click(".acts > button:has-text('Priority')")
        person.page.wait_for_selector(".problem:has-text('priority: is not a number')")
        submitted(http, {"command": ["true"], "label": "told"})
        person.page.wait_for_selector("tbody tr:nth-child(2)")
    assert person.page.inner_text(".problem") == "priority: is not a number"
    person.page.fill("input[data-field=priority]", "7")
    person.page.click(".acts > button:has-text('Priority')")
    person.page.wait_for_selector(".question p:has-text('Priority 2 jobs to 7')")
    person.page.wait_for_selector(".problem:empty", state="attached")


def test_what_is_done_on_a_page_before_it_is_connected_counts(person: Person, shown: Console) -> None:
    with shown.served.client(shown.ours) as http:
        (job,) = submitted(http, {"command": ["true"], "label": "early"})
    person.log_in(shown.operator)
    connections: list[Any] = []
    person.page.route_web_socket("**/socket.io/**", lambda held: connections.append(held))
    person.go("/jobs?label=early")
    person.page.fill("input[data-field=reason]", "typed early")
    person.page.click("button:has-text('Theme')")
    person.page.click(".acts > button:has-text('Hold')")
    assert not person.page.evaluate("window.did_handshake")
    connections[-1].connect_to_server()
    assert person.sees("Theme: light")
    person.page.wait_for_selector(".question p:has-text('Hold 1 job?')")
    person.page.click(".question .agree")
    person.page.wait_for_selector("text=hold: 1 changed")
    with shown.served.client(shown.operator) as http:
        assert http.get(f"/v1/jobs/{job}").json()["events"][-1]["details"]["reason"] == "typed early"


def test_a_submitter_has_few_buttons_and_a_hidden_page_is_silent(person: Person, shown: Console, jobs: Any) -> None:
    person.log_in(shown.ours, "/jobs?label=none")
    assert person.sees("No job passes the filter on this page.")
    named = person.page.locator(".acts > button:visible").all_inner_texts()
    assert named == ["Cancel", "Priority"]
    hide = "v => {Object.defineProperty(document, 'visibilityState', {value: v, configurable: true});"
    person.page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange'))}", "hidden")
    # What is typed comes after it on the same websocket, and a button answers when it has arrived.
    person.page.click(".acts > button:has-text('Cancel')")
    person.page.wait_for_selector(".problem:has-text('no job that passes')")
    with shown.served.client(shown.ours) as http:
        submitted(http, {"command": ["true"], "label": "none"})
    person.page.wait_for_timeout(1000 * (LOOK + 1))
    assert person.page.locator("tbody tr").count() == 0
    person.page.evaluate(hide + "document.dispatchEvent(new Event('visibilitychange'))}", "visible")
    person.page.wait_for_selector("tbody tr")


def test_an_operator_drains_a_bot_and_a_submitter_sees_none(person: Person, shown: Console, jobs: Any) -> None:
    person.log_in(shown.operator, "/bots/b1")
    assert person.sees("ok")
    for button, status in (("Drain", "draining"), ("Undrain", "ok")):
        person.page.click(f".acts > button:text-is('{button}')")
        person.page.wait_for_selector(".question p:has-text('b1')")
        person.page.click(".question .agree")
        person.page.wait_for_selector(f"dd .badge:text-is('{status}')")
        person.page.wait_for_selector(f".acts > button:text-is('{button}')", state="hidden")
    person.log_in(shown.ours, "/bots/b1")
    assert person.page.locator("nav.top a").all_inner_texts() == ["Pool", "Jobs", "Graphs", "Builds", "Schedules"]
    assert "for operators" in person.page.inner_text(".problem")
    assert "b1" not in person.page.inner_text("main")


def test_a_schedule_is_made_and_a_chosen_one_is_run_and_paused(person: Person, shown: Console) -> None:
    with shown.served.client(shown.ours) as http:
        http.put("/v1/schedules/nightly", json={"cron": "0 3 * * *", "job": {"command": ["true"], "label": "by hand"}})
        person.log_in(shown.ours, "/schedules")
        person.page.click("summary:text-is('+ schedule')")
        typed = {"name": "weekly", "cron": "0 3 * * 9", "time zone": "Asia/Tokyo", "command": "make 'a b'"}
        typed |= {"overlap": "skip", "catch up": "all", "most of all": "3"}
        for field, value in typed.items():
            person.page.fill(f"input[data-field='{field}']", value)
        person.page.click("button:text-is('Preview')")
        person.page.wait_for_selector(".problem:has-text('cron: ')")
        person.page.fill("input[data-field=cron]", "0 3 * * 1")
        person.page.click("button:text-is('Preview')")
        person.page.wait_for_selector("details tbody tr:nth-child(5) td:has-text('03:00 JST')")
        person.page.click(".acts > button:text-is('Make the schedule')")
        person.page.wait_for_selector(".question p:has-text('Make the schedule weekly of ours?')")
        person.page.click(".question .agree")
        person.page.wait_for_selector("text=weekly is made.")
        made = http.get("/v1/schedules/weekly").json()
        assert (made["zone"], made["job"]) == ("Asia/Tokyo", {"command": ["make", "a b"]})
        assert (made["overlap"], made["catch_up"], made["catch_up_most"]) == ("skip", "all", 3)
        http.delete("/v1/schedules/weekly")
        person.go("/schedules")
        person.page.wait_for_selector("text='0 3 * * * UTC'")
        person.page.check("tbody tr input")
        for button, told in (("Run now", "td .badge:text-is('queued')"), ("Pause", ".badge:text-is('paused')")):
            person.page.click(f".acts > button:text-is('{button}')")
            person.page.wait_for_selector(f".question p:text-is('{button}: nightly?')")
            person.page.click(".question .agree")
            person.page.wait_for_selector(told)
        assert http.get("/v1/schedules/nightly").json()["enabled"] is False
        assert [job["label"] for job in http.get("/v1/jobs?label=by%20hand").json()["jobs"]] == ["by hand"]


def test_a_page_whose_session_is_over_goes_to_the_log_in(person: Person, shown: Console, jobs: Any) -> None:
    person.log_in(shown.operator, "/")
    # wait_for_function would evaluate a string in the page, which its policy forbids.
    eventually(lambda: person.page.evaluate("window.did_handshake"))
    other = person.context.new_page()
    other.goto(shown.url + "/jobs")
    other.click("text=Log out")
    person.page.wait_for_url("**/login?over=1")
    assert "over" in person.page.inner_text(".problem")


def test_colours_follow_the_system_until_the_session_has_chosen_others(person: Person, shown: Console) -> None:
    person.log_in(shown.operator, "/")
    back = "getComputedStyle(document.body).backgroundColor"
    system = person.page.evaluate(back)
    for told in ("light", "dark"):
        person.page.click("button:has-text('Theme')")
        assert person.sees(f"Theme: {told}")
    assert person.page.evaluate(back) != system
    dark = person.page.evaluate(back)
    person.go("/jobs")
    assert person.sees("Theme: dark")
    assert person.page.evaluate(back) == dark
