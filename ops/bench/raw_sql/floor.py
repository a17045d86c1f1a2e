"""Measure raw SQL on bare tables, without events, fences, quotas or placement.

It is a figure to compare ours with and no goal: it leaves out what a pool is for. `layout` measures what another layout
of the tables would give.

    python -m ops.bench.raw_sql.floor rates [assign] [cycle] [submit] [--batch 100] [--runs 3] [--json]
    python -m ops.bench.raw_sql.floor layout [--aged 300000] [--runs 3] [--json]
"""

import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import click
import psycopg
from leasehold.errors import LeaseholdError
from rich.console import Console
from rich.table import Table

from ops.bench import sql_clients
from ops.bench.fixtures import server
from ops.bench.measure import Stretch, blank_table, per_job, spread
from ops.bench.raw_sql import layout

TABLES = (
    """
    CREATE TABLE jobs (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        priority integer NOT NULL,
        state text NOT NULL DEFAULT 'queued',
        payload jsonb NOT NULL
    )
    """,
    "CREATE INDEX jobs_ready ON jobs (priority, id) WHERE state = 'queued'",
    "CREATE TABLE leases (job_id bigint PRIMARY KEY, bot_id bigint NOT NULL)",
)
FILL = """
INSERT INTO jobs (priority, state, payload)
SELECT 0, '{state}', '{{"command": ["true"]}}' FROM generate_series(1, {jobs})
"""
SUBMIT = """
INSERT INTO jobs (priority, payload)
SELECT * FROM unnest(%(priorities)s::integer[], %(payloads)s::jsonb[]) RETURNING id
"""
ASSIGN = """
WITH picked AS MATERIALIZED (
    SELECT id FROM jobs WHERE state = 'queued' ORDER BY priority, id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE jobs j SET state = 'leased' FROM picked p WHERE j.id = p.id RETURNING j.id
)
INSERT INTO leases (job_id, bot_id) SELECT id, %(bot)s FROM moved RETURNING job_id AS id
"""
FINISH = """
WITH ended AS (DELETE FROM leases WHERE job_id = ANY (%(id)s::bigint[]) RETURNING job_id)
UPDATE jobs j SET state = 'succeeded' FROM ended e WHERE j.id = e.job_id RETURNING j.id
"""
#: Older jobs, so that no plan is made while the table is empty.
FORMER = FILL.format(state="cancelled", jobs=20_000)
LEASED = "SELECT count(*) FROM leases l JOIN jobs j ON j.id = l.job_id AND j.state = 'leased'"
FINISHED = "SELECT count(*) FROM jobs WHERE state = 'succeeded'"
QUEUED = "SELECT count(*) FROM jobs WHERE state = 'queued'"
BATCHES = (1, 10, 100, 500)


class Floor(Protocol):
    """One shape of work: creates the tables and measures."""

    def __call__(self, url: str, *, processes: int, batch: int, jobs: int) -> Stretch: ...


class Assigning:
    """Assign in batches of one size."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __call__(self, client: sql_clients.Client) -> None:
        while client.more:
            client.add(len(client.execute(ASSIGN, {"batch": self.batch, "bot": client.number})["id"]))


class Submitting:
    """Submit in batches of one size."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __call__(self, client: sql_clients.Client) -> None:
        new = sql_clients.requests(self.batch)
        while client.more:
            client.add(len(client.execute(SUBMIT, new)["id"]))


def assign(url: str, *, processes: int, batch: int, jobs: int) -> Stretch:
    """Assign `jobs` from a queue that never runs out, `batch` in a transaction."""
    sql_clients.create(url, (*TABLES, FORMER, FILL.format(state="queued", jobs=jobs + processes * batch)))
    stretch = sql_clients.run(url, Assigning(batch), processes=processes, jobs=jobs)
    sql_clients.expect("leases", sql_clients.one(url, LEASED), stretch.jobs)
    return stretch


def cycle(url: str, *, processes: int, batch: int, jobs: int) -> Stretch:
    """Submit, assign and finish `jobs`, `batch` of them in each transaction; the seconds cover all three."""
    sql_clients.create(url, (*TABLES, FORMER))
    work = sql_clients.Cycling(SUBMIT, ASSIGN, FINISH, batch)
    stretch = sql_clients.run(url, work, processes=processes, jobs=jobs)
    sql_clients.expect("finished jobs", sql_clients.one(url, FINISHED), stretch.jobs)
    return stretch


def submit(url: str, *, processes: int, batch: int, jobs: int) -> Stretch:
    """Submit `jobs`, `batch` in a transaction."""
    sql_clients.create(url, (*TABLES, FORMER))
    stretch = sql_clients.run(url, Submitting(batch), processes=processes, jobs=jobs)
    sql_clients.expect("queued jobs", sql_clients.one(url, QUEUED), stretch.jobs)
    return stretch


SHAPES: dict[str, Floor] = {"assign": assign, "cycle": cycle, "submit": submit}
#: Jobs of a run: enough for a second or two.
MOST = {"assign": 100_000, "cycle": 50_000, "submit": 200_000}


def measured(url: str, shape: str, batch: int, *, processes: int, runs: int) -> dict[str, Any]:
    """Return a row: jobs per second over the runs, and the costs of one job."""
    jobs = min(2_000 * (batch + 1), MOST[shape])
    stretches = [SHAPES[shape](url, processes=processes, batch=batch, jobs=jobs) for _ in range(runs)]
    median, least, most = spread([stretch.rate for stretch in stretches])
    costs = per_job(stretches)
    return {
        "shape": shape,
        "batch": batch,
        "processes": processes,
        "jobs": jobs,
        "jobs_per_second": {"median": round(median), "min": round(least), "max": round(most)},
        "per_job": {name: round(costs[name], 4) for name in ("transactions", "buffers", "wal_bytes")},
    }


def _rates(rows: Sequence[dict[str, Any]]) -> Table:
    figures = ("K", "clients", "jobs/s", "min", "max", "WAL bytes/job", "buffers/job")
    table = blank_table("Raw SQL on bare tables", "shape", *figures)
    for row in rows:
        rate, costs = row["jobs_per_second"], row["per_job"]
        cells = (f"{rate[name]:,}" for name in ("median", "min", "max"))
        costs = (f"{costs['wal_bytes']:,.0f}", f"{costs['buffers']:.1f}")
        table.add_row(row["shape"], str(row["batch"]), str(row["processes"]), *cells, *costs)
    return table


def _show(rows: list[dict[str, Any]], table: Table, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows))
    else:
        Console().print(table)


processes_option = click.option(
    "--processes", type=click.IntRange(1, 64), default=2, show_default=True, help="Clients that work at the same time."
)
runs_option = click.option(
    "--runs", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each shape."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a table.")


@click.group(help=__doc__.split("\n\n")[0] if __doc__ else None)
def main() -> None:
    pass


@main.command()
@click.argument("shapes", nargs=-1, type=click.Choice(list(SHAPES)))
@click.option("--batch", "batches", type=click.IntRange(1, 10_000), multiple=True, default=BATCHES, show_default=True)
@processes_option
@runs_option
@json_option
def rates(shapes: Sequence[str], batches: Sequence[int], processes: int, runs: int, *, as_json: bool) -> None:
    """Assign, cycle and submit with K jobs in a transaction."""
    try:
        with server() as url:
            rows = [
                measured(url, shape, batch, processes=processes, runs=runs)
                for shape in shapes or SHAPES
                for batch in batches
            ]
    except (LeaseholdError, psycopg.Error) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    _show(rows, _rates(rows), as_json=as_json)


@main.command("layout")
@click.option(
    "--batch", "batches", type=click.IntRange(1, 10_000), multiple=True, default=(100, 500), show_default=True
)
@click.option(
    "--jobs", type=click.IntRange(1), default=20_000, show_default=True, help="Jobs of each measured stretch."
)
@click.option(
    "--aged",
    type=click.IntRange(1),
    default=300_000,
    show_default=True,
    help="Jobs between the fresh and the aged stretch.",
)
@processes_option
@runs_option
@json_option
def compare(batches: Sequence[int], jobs: int, aged: int, processes: int, runs: int, *, as_json: bool) -> None:
    """Compare one table updated in place with tables of inserts and deletes, with our indexes and events."""
    try:
        with server() as url:
            rows = layout.compared(url, batches=batches, jobs=jobs, aged=aged, processes=processes, runs=runs)
    except (LeaseholdError, psycopg.Error) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    _show(rows, layout.table(rows), as_json=as_json)


if __name__ == "__main__":
    main()
