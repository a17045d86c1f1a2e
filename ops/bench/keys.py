"""Measure starts per second of jobs that each have one of many keys, beside jobs without any.

Keys are locks that have their slots from a pattern, and resource classes that have their rate from one. One lock that
all jobs hold shows what a lock costs without many keys. No limit is ever reached, so that what differs is the cost of
keys. Two assigner processes place jobs as in `run.py`, on bots that have room for all of them. The contenders take
turns; one run of each before them is not counted. A rate is compared with the one without keys of the same turn.

Each key is used by as many jobs as `--jobs` is times `--keys`. Few jobs of each show what the first use of a key costs.

    python -m ops.bench.keys [--keys 10000] [--jobs 90000] [--runs 3] [--json]
"""

import json
import statistics
from collections.abc import Callable
from typing import Any

import click

from ops.bench.fixtures import FILL, Shape, empty, fill, opened, request, server, settle
from ops.bench.measure import Stretch, checked
from ops.bench.workers import Assigning, run
from schema.accounting import counters, rates
from schema.moves import submit as submit_moves
from schema.postgres.engine import Database

#: More than all jobs together.
MANY = 1_000_000
PROCESSES = 2
#: Each process has a part of these bots to itself, as in a large pool. With fewer, the processes would take turns.
BOTS = 400
#: The constraints of a job by its key, for each contender; None = it has none.
CONTENDERS: dict[str, Callable[[int], dict[str, Any]] | None] = {
    "no keys": None,
    "one lock": lambda _: {"locks": ["customer-all"]},
    "locks": lambda key: {"locks": [f"customer-{key}"]},
    "rates": lambda key: {"resource_class": f"api-{key}"},
}


def filled(database: Database, contender: str, *, keys: int, jobs: int) -> None:
    """Make the bots, the patterns and the jobs of a contender."""
    shape = Shape(bots=BOTS, capacity=2 * jobs // BOTS, quotas=False)
    fill(database, shape)
    named = ["default", "customer-*"]
    database.run(lambda c: counters.set_limits(c, counters.SLOTS_OF_LOCK, {tuple(named): MANY}, actor="bench"))
    database.run(lambda c: rates.set_rates(c, {"api-*": rates.RateTerms(1e6, MANY)}, actor="bench"))
    terms = CONTENDERS[contender]
    for first in range(0, jobs, FILL):
        wanted = [
            {**request(number, shape), "instance": "default"} | ({"terms": terms(number % keys)} if terms else {})
            for number in range(first, min(first + FILL, jobs))
        ]
        database.run(lambda connection, wanted=wanted: submit_moves.submit(connection, wanted, actor="bench"))
    settle(database)


def starts(url: str, contender: str, *, keys: int, jobs: int) -> Stretch:
    """Place nine of ten jobs of a contender in a fresh database."""
    with empty(url, "bench") as name, opened(name) as database:
        filled(database, contender, keys=keys, jobs=jobs)
        stretch = run(name, Assigning(), processes=PROCESSES, jobs=jobs * 9 // 10)
        checked(database)
    return stretch


@click.command(help=__doc__.split("\n\n")[0] if __doc__ else None)
@click.option("--keys", type=click.IntRange(1), default=10_000, show_default=True, help="Distinct keys.")
@click.option("--jobs", type=click.IntRange(1000), default=90_000, show_default=True, help="Queued jobs.")
@click.option("--runs", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of each contender.")
@click.option("--only", multiple=True, type=click.Choice(list(CONTENDERS)), help="Measure only these.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def main(keys: int, jobs: int, runs: int, *, only: tuple[str, ...], as_json: bool) -> None:
    found: dict[str, list[float]] = {name: [] for name in only or CONTENDERS}
    with server() as url:
        for turn in range(runs + 1):
            for name, each in found.items():
                rate = starts(url, name, keys=keys, jobs=jobs).rate
                each.extend([rate] if turn else [])
    base = found.get("no keys")
    ratios = {name: [one / by for one, by in zip(each, base, strict=True)] for name, each in found.items() if base}
    medians = {name: statistics.median(each) for name, each in found.items()}
    if as_json:
        click.echo(json.dumps({"starts_per_second": found, "medians": medians, "ratios": ratios}))
        return
    for name, each in found.items():
        beside = ""
        if name in ratios and name != "no keys":
            low, high = min(ratios[name]), max(ratios[name])
            beside = f", {statistics.median(ratios[name]):.2f} of those without keys ({low:.2f} to {high:.2f})"
        click.echo(f"{name}: {medians[name]:,.0f} starts/s ({min(each):,.0f} to {max(each):,.0f}){beside}")


if __name__ == "__main__":
    main()
