"""`python -m ops.life`: let a small pool live for days or years on a virtual clock, and judge what it did."""

import random
import sys
from datetime import UTC, datetime, timedelta

import click

from assigner.logs import to_stderr
from ops.life.scenario import Life
from schema import clock
from schema.postgres import embedded

#: A year in which the clocks of the scenario's zones change.
START = datetime(2033, 1, 1, tzinfo=UTC)
#: Jobs a day that the pool of the scenario has run before its calm ends: half of what its bots could.
MOST_JOBS = 500.0


@click.command()
@click.option("--days", type=click.IntRange(1, 3660), default=365, show_default=True, help="Days to live.")
@click.option("--seed", type=int, help="Everything that chance decides follows from it.  [default: drawn]")
@click.option(
    "--jobs",
    type=click.FloatRange(0, MOST_JOBS),
    default=200.0,
    show_default=True,
    help="Jobs a day, beside graphs and schedules. More would still wait when the scenario looks whether any does.",
)
def main(days: int, seed: int | None, jobs: float) -> None:
    """Let a pool with three tenants, limits, graphs, schedules and faults live on a virtual clock.

    Exits with 1 if an invariant broke, a job started too early or too late, or a tick was left out.
    """
    to_stderr("ERROR")
    chosen = random.SystemRandom().getrandbits(32) if seed is None else seed
    click.echo(f"seed {chosen}, {days} days from {START:%Y-%m-%d}, about {jobs:g} jobs a day")
    began = clock.monotonic()
    with embedded.serve_for_now("leasehold-life-") as server:
        life = Life(server.url, chosen, START, jobs_a_day=jobs)
        life.run(days)
    took = clock.monotonic() - began
    speed = timedelta(days=days).total_seconds() / took
    click.echo(f"{took:.0f} s, {speed:,.0f} times real time; {life.pool.counts}")
    click.echo(", ".join(f"{count:,} x {name}" for name, count in sorted(life.done.items())))
    click.echo(f"digest of the leases: {life.digest}")
    for wrong in life.wrong:
        click.echo(f"wrong: {wrong}", err=True)
    click.echo("nothing was wrong" if not life.wrong else f"{len(life.wrong)} things were wrong")
    sys.exit(1 if life.wrong else 0)


if __name__ == "__main__":
    main()
