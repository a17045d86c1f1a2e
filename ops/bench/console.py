"""Measure how long each page of the console takes before a deep pool, and what open consoles cost the pool.

A page is timed in a browser, from the request until its figures are there. Then consoles of 20 people stay open, and
the processor time of gateway, console and PostgreSQL is read from /proc. It needs the extra `leasehold[console]`,
playwright and a Chromium.

    python -m ops.bench.console [--jobs 1000000] [--bots 500] [--consoles 20] [--seconds 60] [--json]
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from assigner.process.children import Child, Children, Role
from ops.bench.fixtures import Shape, fill, opened
from ops.bench.gateway.latency import ready
from ops.bench.measure import cpu_seconds_of_tree
from ops.bench.workers import Assigning, run
from schema import clock
from schema.postgres import embedded, migrate
from schema.postgres.statements import Statement
from schema.tenancy import tokens

#: Times that each page is opened.
RUNS = 10
#: Pages that are timed, with what has to be on them. `{job}` and `{bot}` are replaced by one that is there.
PAGES: Mapping[str, str] = {
    "/": "td a:text-is('tenant-19')",
    "/jobs": "tbody tr:nth-child(50)",
    "/jobs?instance=tenant-7&state=queued": "tbody tr:nth-child(50)",
    "/jobs/{job}": ".lead .badge:has-text('queued')",
    "/graphs": ".empty:visible",
    "/bots": "tbody tr:nth-child(100)",
    "/bots/{bot}": "dd:has-text('of 10')",
    "/tenants": "td a:text-is('tenant-19')",
    "/preemptions": ".empty:visible",
    "/limits": ".note:not(:empty), tbody tr",
    "/policy": "tbody tr",
    "/health": "dd",
}
#: Milliseconds for which a page may take at most.
WITHIN = 120_000


@dataclass(frozen=True)
class Stand:
    """A filled pool with its gateway and console, and the processes whose time is read."""

    url: str
    token: str
    pids: Mapping[str, int]
    job: str
    bot: str


@contextmanager
def stand(jobs: int, bots: int) -> Iterator[Stand]:
    """Fill a pool, and run a gateway and a console before it."""
    data = embedded.scratch("leasehold-bench-")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, data, ignore_errors=True)
        server = stack.enter_context(embedded.serve(data))
        database = stack.enter_context(opened(server.url))
        migrate.upgrade(database)
        fill(database, Shape(bots=bots, queued=jobs, instances=20, platforms=5, shares=True))
        run(server.url, Assigning(), processes=2, jobs=min(jobs, 8 * bots))
        token = database.run(lambda connection: tokens.create(connection, tokens.Kind.OPERATOR))
        newest = "SELECT public_id FROM jobs WHERE state = 'queued' ORDER BY id DESC LIMIT 1"
        job = str(database.run(lambda connection: connection.execute(Statement(newest)).scalar_one()))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}
        environ |= {"LEASEHOLD_DATABASE_URL": server.url, "LEASEHOLD_GATEWAY_PORT": "0"}
        children = Children(data / "log", environ, report=lambda _: None, chance=random.Random(1), restart=False)
        stack.callback(children.kill)
        defaults = data / "leasehold.toml"
        defaults.touch()
        program = (sys.executable, "-m", "assigner.cli.main", "--data", str(data), "--config", str(defaults))
        children.start(Child(name="gateway", role=Role.GATEWAY, command=(*program, "gateway")))
        gateway = ready(children, data / "gateway.url", database, listeners=1)
        console = subprocess.Popen(
            [*program, "console", "--url", gateway, "--port", "0"], stdout=subprocess.PIPE, text=True, env=environ
        )
        stack.callback(console.wait, 60)
        stack.callback(console.terminate)
        assert console.stdout is not None
        url = console.stdout.readline().rpartition(" ")[2].strip()
        pids = {**children.processes(), "console": console.pid, "PostgreSQL": server.pid}
        yield Stand(url, token, pids, job, "bot-0")


def logged_in(browser: Any, pool: Stand) -> Any:
    """Return a page of a new person who has logged in."""
    page = browser.new_context().new_page()
    page.set_default_timeout(WITHIN)
    page.goto(f"{pool.url}/login")
    page.fill("#token", pool.token)
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:text-is('Pool')")
    return page


def times(page: Any, pool: Stand) -> dict[str, list[float]]:
    """Return the seconds that each page took, each time."""
    found: dict[str, list[float]] = {path: [] for path in PAGES}
    for _ in range(RUNS):
        for path, there in PAGES.items():
            began = clock.monotonic()
            page.goto(pool.url + path.format(job=pool.job, bot=pool.bot), wait_until="commit")
            page.locator(there).first.wait_for()
            found[path].append(clock.monotonic() - began)
    return found


def load(browser: Any, pool: Stand, *, consoles: int, seconds: float) -> dict[str, float]:
    """Return the parts of a core that the processes take while so many people each have a page open."""
    paths = [path.format(job=pool.job, bot=pool.bot) for path in PAGES]
    for number in range(consoles):
        logged_in(browser, pool).goto(pool.url + paths[number % len(paths)])
    before = {name: cpu_seconds_of_tree(pid) for name, pid in pool.pids.items()}
    began = clock.monotonic()
    clock.sleep(seconds)
    took = clock.monotonic() - began
    return {name: (cpu_seconds_of_tree(pid) - before[name]) / took for name, pid in pool.pids.items()}


@click.command()
@click.option("--jobs", type=click.IntRange(100), default=1_000_000, show_default=True, help="Queued jobs.")
@click.option("--bots", type=click.IntRange(100), default=500, show_default=True)
@click.option("--consoles", type=click.IntRange(0, 100), default=20, show_default=True, help="People with a page open.")
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Time over which their cost is read.")
@click.option("--pictures", type=click.Path(path_type=Path, file_okay=False), help="Keep a picture of each page here.")
@click.option("--json", "as_json", is_flag=True)
def main(jobs: int, bots: int, consoles: int, seconds: float, pictures: Path | None, *, as_json: bool) -> None:
    """Measure the pages of the console, and the cost of open ones."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    options = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with stand(jobs, bots) as pool, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=options)
        try:
            page = logged_in(browser, pool)
            found = times(page, pool)
            if pictures is not None:
                _pictures(page, pool, pictures)
            page.close()
            cost = load(browser, pool, consoles=consoles, seconds=seconds)
        finally:
            browser.close()
    if as_json:
        click.echo(json.dumps({"seconds": found, "cores": cost}))
        return
    for path, took in found.items():
        click.echo(f"{path:40} p50 {median(took):6.2f} s   worst {max(took):6.2f} s")
    for name, part in cost.items():
        click.echo(f"{consoles} open: {name:12} {part:7.1%} of a core")


def _pictures(page: Any, pool: Stand, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        for path, there in PAGES.items():
            page.goto(pool.url + path.format(job=pool.job, bot=pool.bot))
            page.locator(there).first.wait_for()
            name = path.strip("/").partition("/")[0].replace("?", "-") + ("-one" if "{" in path else "")
            page.screenshot(path=directory / f"{name or 'pool'}-{theme}.png", full_page=True)


if __name__ == "__main__":
    main()
