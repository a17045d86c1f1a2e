"""Every page on a telephone and on a large screen: nothing overflows, no word breaks, axe-core does not complain."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http import submitted
from tests.support.patience import MINUTE
from tests.support.screens.console import Console, Person
from tests.support.servers import Bot

#: Widths of the screens, in pixels.
TELEPHONE, SCREEN = 420, 1400
#: What axe-core judges: the rules of WCAG 2.2 in the levels A and AA, and of these again what depends on the width.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
CONTRAST = ["color-contrast", "scrollable-region-focusable"]
# Words that stand on two lines although neither a hyphen nor a slash divides them there. Of ids and paths, which are
# longer than any word, the parts are words.
BROKEN = """() => {
  const found = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (text.parentElement.closest("pre, script, style, option") || !text.parentElement.checkVisibility()) continue;
    for (const word of text.data.matchAll(/[\\p{L}\\p{N}]{2,24}/gu)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top / 4))).size > 1) found.push(word[0]);
    }
  }
  return found;
}"""


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
    with shown.served.client(shown.operator) as http:
        http.put("/v1/quotas/default/ours?create=true", json={"min": 3, "max": 2_147_483_647})
        http.put("/v1/rates/compiler", json={"per_second": 12.5, "burst": 19})
    Bot(shown.served)
    return {
        "/": "td a",
        "/jobs": "tbody tr",
        "/jobs?label=none&state=failed": ".empty:visible",
        f"/jobs/{held}": ".badge",
        f"/jobs/{failed}": ".badge",
        "/graphs": "tbody tr",
        f"/graphs/{graph}": "tbody tr",
        "/bots": "tbody tr",
        "/bots/b1": "dd",
        "/tenants": "tbody tr",
        "/preemptions": ".empty:visible",
        "/limits": "tbody tr",
        "/policy": "tbody tr",
        "/health": "tbody tr",
    }


@pytest.fixture
def watched(chromium: Any, shown: Console) -> Iterator[Person]:
    """A person in whose browser axe-core may change styles for a moment, which the policy of the pages forbids."""
    context = chromium.new_context(bypass_csp=True)
    context.set_default_timeout(MINUTE * 1000)
    yield Person(context, shown)
    context.close()


def test_every_page_fits_a_telephone_and_a_screen(watched: Person, shown: Console, paths: dict[str, str]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page, faults = watched.page, []
    watched.log_in(shown.operator)
    for path, there in paths.items():
        page.set_viewport_size({"width": TELEPHONE, "height": 900})
        watched.go(path)
        page.locator(there).first.wait_for()
        for width, rules in ((TELEPHONE, RULES), (SCREEN, CONTRAST)):
            page.set_viewport_size({"width": width, "height": 900})
            wide, broken = page.evaluate("document.documentElement.scrollWidth"), page.evaluate(BROKEN)
            judged = axe.run(page, options={"runOnly": rules, "resultTypes": ["violations"]}).response["violations"]
            said = [f"{one['id']}: {each['html'][:120]}" for one in judged for each in one["nodes"][:3]]
            if wide > width or broken or said:
                faults.append(f"{path} at {width}: {wide} wide; broken: {broken}; {said}")
    assert not faults, "\n".join(faults)
    assert watched.complaints == []
