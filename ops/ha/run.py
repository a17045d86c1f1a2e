"""The command of failover runs: `python -m ops.ha.run`, as root. It prints one table and exits with 1 on any violation.

Faults:

    switchover  Patroni is asked for another primary, as an operator does before maintenance.
    crash       SIGKILL to the primary's postmaster; its machine, etcd and Patroni stay.
    kill        SIGKILL to every process on the primary's machine at once, as at a loss of power.
    partition   The primary's machine loses the others and HAProxy, while a gateway and a caller on it still reach it.
    hang        SIGSTOP to the primary's Patroni, so that nobody there notices that the lock was lost.

After each fault the machine comes back, every standby must follow again, and the invariants of `leasehold db verify`
must hold. At the end all jobs are finished, and journal, execution log and database are compared.
"""

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from ops.chaos.checker import Kind, Violation
from ops.chaos.report import Injection, Report, table
from ops.ha import machines
from ops.ha.cluster import Cluster, Member, NotWhole, missing
from ops.ha.pool import Pool, Shape, longest_wait, running
from schema import clock
from schema.postgres import embedded
from schema.timing import Timing

#: Seconds for which a member that was cut off, or hangs, stays so after another one has become primary.
LONGER = 10.0
#: Violations that are told one by one.
SHOWN = 20
#: A session outlives the slowest failover, so that bots keep what they run.
TTL = 90.0


def switchover(pool: Pool, primary: Member) -> None:  # noqa: ARG001
    pool.cluster.switch_over()


def crash(pool: Pool, primary: Member) -> None:
    primary.crash_server()
    pool.cluster.wait_primary(other_than=primary)


def kill(pool: Pool, primary: Member) -> None:
    primary.machine.kill()
    pool.cluster.wait_primary(other_than=primary)
    primary.start()


def partition(pool: Pool, primary: Member) -> None:
    with pool.inside(primary) as caller:
        primary.machine.cut()
        before = pool.acknowledged_by(caller)
        pool.cluster.wait_primary(other_than=primary)
        clock.sleep(LONGER)
        click.echo(
            f"  the side that was cut off acknowledged {pool.acknowledged_by(caller) - before} submits", err=True
        )
        primary.machine.mend()


def hang(pool: Pool, primary: Member) -> None:
    with pool.inside(primary):
        primary.pause_patroni()
        pool.cluster.wait_primary(other_than=primary)
        clock.sleep(LONGER)
        primary.resume_patroni()


FAULTS: dict[str, Callable[[Pool, Member], None]] = {
    "switchover": switchover,
    "crash": crash,
    "kill": kill,
    "partition": partition,
    "hang": hang,
}
DEFAULTS = {"switchover": 2, "crash": 2, "kill": 10, "partition": 2, "hang": 1}


class Outage(Injection):
    """A fault whose recovery is the longest time without an acknowledged submit. Results of jobs are not timed."""

    @property
    def recovery(self) -> float | None:
        """That time, in seconds."""
        return self.submitted


def inject(pool: Pool, name: str, report: Report) -> Injection:
    """Inject one fault, wait until everything is whole again, and verify the database. Raises NotWhole."""
    pool.wait_acknowledged(clock.monotonic())
    primary, began = pool.cluster.wait_primary(), clock.monotonic()
    waited = None
    try:
        FAULTS[name](pool, primary)
        pool.wait_acknowledged(clock.monotonic())
        waited = longest_wait(pool.journal.path, began, clock.monotonic())
        pool.cluster.wait_whole()
        report.violations += pool.broken_invariants()
    finally:
        report.injections.append(Outage(name, primary.name, began, clock.monotonic(), None, waited))
    return report.injections[-1]


@contextmanager
def prepared(seed: int, *, synchronous: bool, proxied: bool, keep: bool) -> Iterator[Pool]:
    """Run a cluster with a pool on it inside the block."""
    directory = embedded.scratch("leasehold-ha-")
    try:
        with Cluster(directory, synchronous=synchronous, proxied=proxied) as cluster:
            cluster.start()
            with running(cluster, random.Random(seed), shape=Shape(), timing=Timing(ttl=TTL)) as pool:
                yield pool
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def run(pool: Pool, counts: dict[str, int], *, seed: int) -> Report:
    """Inject so many of each fault, one after another, and check everything at the end."""
    began = clock.monotonic()
    report = Report(seed, directory=str(pool.cluster.directory))
    try:
        for name, count in counts.items():
            for number in range(1, count + 1):
                injection = inject(pool, name, report)
                took = injection.healed - injection.began
                click.echo(
                    f"{name} {number} of {count}, primary {injection.target}: {injection.recovery:.1f} s without an"
                    f" acknowledged submit, whole after {took:.0f} s",
                    err=True,
                )
    except NotWhole as error:
        report.violations.append(Violation(Kind.STUCK, str(error), clock.monotonic()))
    report.violations += pool.finish()
    report.counts, report.seconds = pool.counts(), clock.monotonic() - began
    return report


def counted(given: str) -> dict[str, int]:
    """Parse `kill=1,partition=2`. Raises click.BadParameter."""
    counts: dict[str, int] = {}
    for part in given.split(","):
        name, _, number = part.partition("=")
        if name not in FAULTS or not number.isdigit():
            raise click.BadParameter(f"{part!r} is not FAULT=NUMBER with a fault of {', '.join(FAULTS)}")
        counts[name] = int(number)
    return counts


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--faults",
    default=",".join(f"{name}={number}" for name, number in DEFAULTS.items()),
    show_default=True,
    help="How often each fault is injected, in this order.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the load.")
@click.option("--asynchronous", is_flag=True, help="Without synchronous_mode, to see what is lost then.")
@click.option("--several-hosts", is_flag=True, help="Without HAProxy, by a URL that names all members.")
@click.option("--keep", is_flag=True, help="Leave the directory with the logs.")
def main(faults: str, seed: int, asynchronous: bool, several_hosts: bool, keep: bool) -> None:
    """Break the primary of a replicated database again and again while a pool works on it.

    Exits with 1 on any violation, and with 3 where a program is missing.
    """
    counts = counted(faults)
    if lacks := missing():
        click.echo("error: this machine lacks " + ", ".join(lacks), err=True)
        sys.exit(3)
    machines.enter("ops.ha.run", sys.argv[1:])
    with prepared(seed, synchronous=not asynchronous, proxied=not several_hosts, keep=keep) as pool:
        report = run(pool, counts, seed=seed)
    click.echo(table([report]))
    click.echo("p50 and worst: seconds without an acknowledged submit")
    click.echo(", ".join(f"{number} {name}" for name, number in report.counts.items()))
    for violation in report.violations[:SHOWN]:
        click.echo(f"after {report.fault_of(violation)}: {violation}")
    if len(report.violations) > SHOWN:
        click.echo(f"and {len(report.violations) - SHOWN} more")
    verdict = f"{len(report.violations)} violations" if report.violations else "no violation"
    click.echo(f"{verdict} in {len(report.injections)} faults and {report.seconds:.0f} s")
    sys.exit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
