"""The console as a process of its own, before a gateway on a database of a test module, and browsers that show it."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.client import Client

from schema.timing import Timing
from tests.support.patience import MINUTE
from tests.support.servers import Databases, Served, opened, serving

#: Programs that show web pages, by their names on Debian and elsewhere.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Console:
    """A console that listens at `url`, the gateway behind it, and tokens of an operator and of two submitters.

    log: what it has written to standard error.
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
            command = [sys.executable, "-m", "assigner.cli.main", "console", "--url", served.url, "--port", "0"]
            environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
            with log.open("w") as errors:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ)
            assert process.stdout is not None
            try:
                said = process.stdout.readline()
                assert " listens at " in said, f"the console did not start: {said!r} {log.read_text()}"
                yield Console(
                    said.rpartition(" ")[2].strip(),
                    log,
                    served,
                    served.token("operator"),
                    served.token("submitter", instance="ours"),
                    served.token("submitter", instance="theirs"),
                )
            finally:
                process.terminate()
                process.wait(60)
                process.stdout.close()
            assert process.returncode == 0
    finally:
        database.close()
        databases.give_back(url)


@contextmanager
def browser() -> Iterator[Any]:
    """Run a browser without a window, and give playwright's object for it; skip the test if there is none."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of the browsers {', '.join(BROWSERS)} is installed (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="the test drives a browser with playwright")
    options = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
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
