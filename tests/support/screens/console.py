"""The console as a process of its own, before a gateway on a database of a test module, and browsers that show it."""

import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.client import Client

from schema.timing import Timing
from tests.support.fork_server.server import ForkedProcess
from tests.support.patience import MINUTE, eventually
from tests.support.servers import Databases, Served, opened, serving

#: Programs that show web pages, by their names on Debian and elsewhere. The first has no windows, which saves a third.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Console:
    """A console that listens at `url`, the gateway behind it, and tokens of an operator and of two submitters.

    log: what it has written.
    """

    url: str
    log: Path
    served: Served
    operator: str
    ours: str
    theirs: str

    @contextmanager
    def client(self, token: str | None = None) -> Iterator[httpx.Client]:
        """A way into the console without a browser; with a token, logged in."""
        origin = {"Origin": self.url}
        with httpx.Client(base_url=self.url, headers=origin, timeout=60, trust_env=False) as http:
            if token is not None:
                answer = http.post("/login", data={"token": token})
                assert (answer.status_code, answer.headers.get("location")) == (303, "/"), answer.text
            yield http


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def unasked() -> Client:
    """A client of a gateway that nobody asks anything."""
    return Client("http://127.0.0.1:9", "token", chance=random.Random(0))


@contextmanager
def console(databases: Databases, template: str, log: Path) -> Iterator[Console]:
    """Run a gateway on a database of its own and the console before it, inside the block. log: for what it says."""
    pytest.importorskip("nicegui", reason="the console needs the extra leasehold[console]")
    url = databases.make(template=template)
    database = opened(url)
    timing = Timing(sync=0.5, ttl=30, reap=0.2, ack=15, poll=0.1)
    try:
        with serving(database, timing) as served:
            environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
            with log.open("w") as output:
                # The import of the framework takes seconds. The fork server has done it for all consoles of a worker.
                command = ["console", "--url", served.url, "--port", "0"]
                process = ForkedProcess(command, output=output.fileno(), environment=environ)
            try:

                def listens() -> str | None:
                    assert process.poll() is None, f"the console did not start: {log.read_text()}"
                    found = re.search(r" listens at (\S+)\n", log.read_text())
                    return found and found[1]

                yield Console(
                    eventually(listens),
                    log,
                    served,
                    served.token("operator"),
                    served.token("submitter", instance="ours"),
                    served.token("submitter", instance="theirs"),
                )
            finally:
                process.terminate()
                process.stdin.close()
                assert process.wait(MINUTE) == 0
    finally:
        database.close()
        databases.give_back(url)


@contextmanager
def browser() -> Iterator[Any]:
    """Run a browser without a window, and give playwright's object for it; skip the test if there is none."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of the browsers {', '.join(BROWSERS)} is installed (Debian: apt install {BROWSERS[0]})")
    playwright = pytest.importorskip("playwright.sync_api", reason="the test drives a browser with playwright")
    # A process of its own for drawing costs a fifth of the time of each page.
    options = [
        "--disable-gpu",
        "--in-process-gpu",
        "--disable-dev-shm-usage",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=str(Path(program)), args=options)
        try:
            yield running
        finally:
            running.close()


@contextmanager
def kept_files(chromium: Any) -> Iterator[Any]:
    """A browser's context for people one after the other: it keeps what pages load, which costs more than they show."""
    context = chromium.new_context()
    context.set_default_timeout(MINUTE * 1000)
    yield context
    context.close()


def left(context: Any) -> None:
    """Close all pages, and forget who was logged in."""
    for page in context.pages:
        page.close()
    context.clear_cookies()


class Person:
    """Somebody who has the context of a browser to themselves. What the browser complains of is collected."""

    def __init__(self, context: Any, shown: Console) -> None:
        self.context = context
        self.page, self.url = context.new_page(), shown.url
        self.complaints: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda asked: self.complaints.append(asked.message))

    def log_in(self, token: str, path: str | None = None) -> None:
        """Go to this page with a session of the token; the form, which one test fills in, costs two pages more."""
        origin = {"Origin": self.url}
        answer = httpx.post(f"{self.url}/login", data={"token": token}, headers=origin, timeout=MINUTE, trust_env=False)
        cookies = [{"name": name, "value": value, "url": self.url} for name, value in answer.cookies.items()]
        assert cookies, answer.text
        self.context.clear_cookies()
        self.context.add_cookies(cookies)
        if path is not None:
            self.go(path)

    def go(self, path: str) -> None:
        self.page.goto(self.url + path)

    def sees(self, text: str) -> bool:
        """Wait until the text is on the page."""
        self.page.get_by_text(text, exact=True).filter(visible=True).first.wait_for()
        return True
