"""Every page on a telephone and on a large screen: keys lead to it, nothing overflows, axe-core does not complain."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from schema.accounting import builds, simulations
from tests.support.http import submitted
from tests.support.patience import MINUTE
from tests.support.screens.console import Console, Person
from tests.support.servers import Bot

#: The invocation of a build.
BUILD = "146439a8-93c0-47ca-b3cd-f556905a3135"
#: Widths of the screens, in pixels.
TELEPHONE, SCREEN = 420, 1400
#: What axe-core judges: good practice and the rules of WCAG 2.2 in the levels A and AA, and of these again what depends
#: on the width.
RULES = ["best-practice", "wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
CONTRAST = ["color-contrast", "scrollable-region-focusable"]
# Words that stand on two lines although neither a hyphen nor a slash divides them there. Of ids and paths, which are
# longer than any word, the parts are words. The dashes of an option stand on the line of its name.
BROKEN = """() => {
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (text.parentElement.closest("pre, script, style, option") || !text.parentElement.checkVisibility()) continue;
    const options = /(?<![^\\s`'"(])--?[a-z](?=\\S{0,31}(?!\\S))/g, words = /[\\p{L}\\p{N}]{2,24}/gu;
    // A text that follows the beginning of an option goes on with its name.
    const within = text.previousSibling?.matches?.(".option");
    const begun = [...text.data.matchAll(options)].filter((word) => !(within && word.index === 0));
    for (const word of [...begun, ...text.data.matchAll(words)]) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const tops = [...range.getClientRects()].map((box) => box.top);
      if (Math.max(...tops) - Math.min(...tops) > 8) found.push(word[0]);
    }
  }
  return found;
}"""
#: A report as `leasehold simulate --title` keeps it.
SIMULATED = {
    "head": ["1,035 jobs on 13 bots, 2026-01-05 00:00 to 2026-01-05 02:00 UTC", "'=': a change of no more than that."],
    "columns": ["instance", "figure", "real", "replayed", "packed.toml"],
    "rows": [
        ["big", "95 %", "10 min", "9 min 58 s", "46.0 s"],
        ["small", "median", "0 s", "0 s", "= 0 s"],
        ["all", "in use", "45.2%", "45.1%", "45.3%"],
    ],
    "losers": {"packed.toml": [["2c5f4e0a1b", "small", "0 s", "at least 30.0 s"]]},
    "since": 1767571200.0,
    "until": 1767578400.0,
    "charts": {
        name: {
            "units": {"big": [float(nth % 9) for nth in range(60)], "small": [3.5] * 60},
            "waits": {"big": [None if nth % 7 == 0 else 600.0 - 9 * nth for nth in range(60)]},
        }
        for name in ("real", "replayed", "packed.toml")
    },
}


@pytest.fixture(scope="module")
def paths(shown: Console) -> dict[str, str]:
    """Paths of all pages, with what has to be there before a page is judged."""
    with shown.served.client(shown.ours) as http:
        long = [
            "./configure",
            "--prefix=/opt/releases/production/x86_64-unknown-linux-gnu",
            "--with-all-optional-parts",
        ]
        held, failed = submitted(
            http, {"command": long, "label": "release-candidate"}, {"command": ["false"], "label": "a"}
        )
        nodes = [{"node": n, "command": ["make", f"part-{n}"], "after": [n - 1] if n > 1 else []} for n in range(1, 6)]
        graph = http.post("/v1/graphs", json={"name": "nightly", "nodes": nodes}).json()["id"]
        submitted(http, {"command": ["true"], "metadata": {"invocation": BUILD}, "label": "a"})
        http.put("/v1/schedules/s", json={"cron": "0 3 * * *", "job": {"command": ["true"]}})
    with shown.served.client(shown.operator) as http:
        answer = http.put("/v1/quotas/default/ours?create=true", json={"min": 3, "max": 17})
        assert answer.status_code == 200, answer.text
        http.put("/v1/rates/compiler", json={"per_second": 12.5, "burst": 19})
    asked = builds.Asked("bazel 7.1.0", 0.0, cached=1207, joined=3, made=418)
    shown.served.database.run(lambda connection: builds.count(connection, [("ours", BUILD, asked)], now=61.0))
    simulated = shown.served.database.run(
        lambda connection: simulations.keep(connection, title="More weight on capacity", report=SIMULATED, actor="test")
    )
    Bot(shown.served)
    Bot(shown.served, "b2", version="0.1.9")
    return {
        "/": "main:has(td a:text-is('ours')):has(.chart text:text-is('JST'))",
        "/jobs": "tbody tr:nth-child(2)",
        "/graphs": "td a:text-is('nightly')",
        "/builds": "main:has(td a:text-is('bazel 7.1.0')):has(td .badge:text-is('running'))",
        "/schedules": "text='0 3 * * * UTC'",
        "/bots": "main:has(td a:text-is('b1')) p:text-is('2 versions: 0.1.9 (1), not known (1)')",
        "/tenants": "tr:has(td a:text-is('ours')):has(td.drawn:visible):has-text('17')",
        "/preemptions": ".empty:text-is('There are none.')",
        "/limits": "main:has(tbody :text-is('19')):has(dd:text-is('0 in use, no limit'))",
        "/policy": "main:has(tbody :text-is('serious_project')):has(td a:text-is('More weight on capacity'))",
        "/health": ".empty:text-is('No assigner process and no gateway has run.')",
        "/jobs?label=none&state=failed": ".empty:visible",
        f"/jobs/{held}": ".badge",
        f"/jobs/{failed}": ".badge",
        "/bots/b1": "dd",
        f"/simulations/{simulated}": ".chart polyline >> nth=1",
        f"/graphs/{graph}": ".drawing .box >> nth=4",
    }


@pytest.fixture
def watched(chromium: Any, shown: Console) -> Iterator[Person]:
    """A person in whose browser axe-core may change styles for a moment, which the policy of the pages forbids."""
    context = chromium.new_context(bypass_csp=True, timezone_id="Asia/Tokyo")
    context.set_default_timeout(MINUTE * 1000)
    context.add_init_script(pytest.importorskip("axe_playwright_python.base").AXE_SCRIPT)
    yield Person(context, shown)
    context.close()


def judge(person: Person, path: str, looks: Sequence[tuple[int, str, list[str]]]) -> Iterator[str]:
    """Look at the open page with each width and theme, and give what is wrong by the page itself or these rules."""
    page = person.page
    for width, theme, rules in looks:
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("theme => {document.documentElement.dataset.theme = theme}", theme)
        wide, broken = page.evaluate("document.documentElement.scrollWidth"), page.evaluate(BROKEN)
        options = {"runOnly": rules, "resultTypes": ["violations"]}
        judged = page.evaluate("options => axe.run(options)", options)["violations"]
        said = [f"{one['id']}: {each['html'][:120]}" for one in judged for each in one["nodes"][:3]]
        if wide > width or broken or said:
            yield f"{path} at {width}, {theme}: {wide} wide; broken: {broken}; {said}"


def test_an_address_without_a_page_shows_the_menu_and_what_to_do(watched: Person, shown: Console) -> None:
    watched.log_in(shown.operator, "/no-such-page")
    watched.page.wait_for_selector("h1:text-is('There is no such page')")
    looks = ((TELEPHONE, "light", RULES), (TELEPHONE, "dark", CONTRAST), (SCREEN, "dark", RULES))
    assert not [*judge(watched, "/no-such-page", looks)]
    watched.page.set_viewport_size({"width": TELEPHONE, "height": 900})
    watched.page.click("button.menu")
    watched.page.click("nav.top a:text-is('Bots')")
    watched.page.wait_for_url(f"{shown.url}/bots")


def test_the_name_of_an_option_breaks_at_no_width_after_its_dashes_and_is_selected_as_it_is(
    watched: Person, shown: Console
) -> None:
    told = 'LONG --queue-timeout gives up, `--label`, -n <script>&lt;&amp; "<b>--it"'
    with shown.served.client(shown.ours) as http:
        (job,) = submitted(http, {"command": ["sh", "-c", f"echo {told}"], "label": "dashes"})
    watched.log_in(shown.ours, "/jobs?label=dashes")
    cell = f"td a[href='/jobs/{job}']"
    page = watched.page
    page.wait_for_selector(cell)
    page.add_style_tag(content="td a.command, td .command { white-space: normal !important; display: block }")
    for width in range(40, 400, 6):
        page.evaluate("([cell, width]) => {document.querySelector(cell).style.maxWidth = width + 'px'}", [cell, width])
        found = [each for each in page.evaluate(BROKEN) if each.startswith("-")]
        assert not found, width
    # The middle button pastes the selection as it is, and no script takes part in that.
    selected = page.evaluate(
        """cell => {
          getSelection().selectAllChildren(document.querySelector(cell));
          return String(getSelection());
        }""",
        cell,
    )
    assert told in selected


def test_every_page_is_reached_with_keys_and_fits_a_telephone_and_a_screen_in_light_and_dark(
    watched: Person, shown: Console, paths: dict[str, str]
) -> None:
    page, faults = watched.page, []
    watched.log_in(shown.operator, "/")
    assert watched.sees("Theme: system")
    page.keyboard.press("?")
    keys = [told.split() for told in page.locator("dialog[open] dt").all_inner_texts() if told.startswith("g ")]
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    names = page.locator("nav.top a").all_inner_texts()
    assert len(keys) == len(names) == len({letter for _, letter in keys})
    for path, there in paths.items():
        page.set_viewport_size({"width": TELEPHONE, "height": 900})
        if keys:
            for key in keys.pop(0):
                page.keyboard.press(key)
            page.wait_for_selector(f"h1:has-text('{names.pop(0)}')")
            page.wait_for_url(shown.url + path)
        else:
            watched.go(path)
        page.locator(there).first.wait_for()
        assert page.inner_text(".problem") == ""
        if path == "/schedules":
            page.click("summary:text-is('+ schedule')")
        faults += judge(watched, path, ((TELEPHONE, "light", RULES), (SCREEN, "dark", CONTRAST)))
    assert page.locator(".drawing .state-blocked + title").last.text_content() == "node 5: blocked\nmake part-5"
    watched.log_in(shown.ours)
    for path in ("/", "/jobs", next(path for path in paths if path.startswith("/jobs/"))):
        watched.go(path)
        page.locator(paths[path]).first.wait_for()
        faults += judge(watched, f"a submitter's {path}", ((TELEPHONE, "dark", RULES), (SCREEN, "light", CONTRAST)))
    assert not faults, "\n".join(faults)
    assert watched.complaints == []
