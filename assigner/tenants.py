"""The operator's commands for instances, their quotas, and cohorts."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import click
from sqlalchemy import Connection

from assigner.drains import drain_instance, reason_option, undrain_instance
from assigner.installation import COMMAND_PATIENCE, Installation
from assigner.operate import as_json, pass_installation, print_json, print_table
from assigner.policies import set_owner_quota, set_project_quota
from assigner.sharing import asked, limit_options, share_options
from schema import accounts, cohorts, instances, quotas, usage
from schema.accounts import Account, PoolLimits
from schema.errors import BadInput
from schema.limits import check_name, escaped

ACTOR = "local"

T = TypeVar("T")

cohort_option = click.option("--cohort", default=cohorts.DEFAULT, show_default=True, metavar="NAME")


def _run(installation: Installation, work: Callable[[Connection], T]) -> T:
    with installation.ready_database("tenants", patience=COMMAND_PATIENCE) as database:
        return database.run(work)


def _told(done: str, *, as_json: bool, **fields: Any) -> None:
    print_json(fields) if as_json else click.echo(done)


def _maximum(_context: click.Context, _option: click.Parameter, value: str | None) -> int | str | None:
    """A number of units, or `none`."""
    if value is None or value == "none":
        return value
    if not (value.isascii() and value.isdigit() and len(value) <= 10):
        raise BadInput("--max", f"'{escaped(value, 40)}' is neither a number of units nor 'none'")
    return int(value)


@click.group("instance")
def instance_group() -> None:
    """The instances that share the pool."""


instance_group.add_command(drain_instance)
instance_group.add_command(undrain_instance)


@instance_group.command("set")
@click.argument("name")
@click.option("--pool", metavar="NAME", help="The instances of one pool are served together.")
@click.option("--no-pool", is_flag=True, help="Of no pool.")
@share_options
@click.option("--no-share", is_flag=True, help="No share of the pool, and no limits.")
@reason_option
@as_json
@pass_installation
def set_instance(
    installation: Installation,
    /,
    name: str,
    pool: str | None,
    no_pool: bool,
    no_share: bool,
    reason: str,
    as_json: bool,
    **share: Any,
) -> None:
    """Make an instance, or change its pool or its share; what is not given stays."""
    check_name("NAME", name)
    account = asked(Account, share)
    if pool is not None and no_pool:
        raise click.UsageError("give at most one of: --pool, --no-pool")
    if account and no_share:
        raise click.UsageError("--no-share means nothing together with a share")
    if pool is None and not (no_pool or no_share or account):
        raise click.UsageError("give a pool, --no-pool, a part of its share, or --no-share")
    if pool is not None:
        check_name("--pool", pool)

    def work(connection: Connection) -> None:
        if pool is not None or no_pool:
            instances.put_instance(connection, name, pool=pool, actor=ACTOR, reason=reason)
        if no_share:
            accounts.remove_account(connection, name, actor=ACTOR, reason=reason)
        elif account:
            accounts.put_account(connection, name, account, actor=ACTOR, reason=reason)

    _run(installation, work)
    done = [f"{name} is of {f'pool {pool}' if pool else 'no pool'}"] if pool is not None or no_pool else []
    done += [f"{name} has no share"] if no_share else [f"the share of {name} is set"] if account else []
    placed = {"pool": pool} if pool is not None or no_pool else {}
    given = account.model_dump(exclude_unset=True) if account else {"share": False} if no_share else {}
    _told("\n".join(done), as_json=as_json, name=name, **placed, **given)


@instance_group.command("limit-all")
@limit_options
@reason_option
@as_json
@pass_installation
def limit_all(installation: Installation, /, reason: str, as_json: bool, **limits: Any) -> None:
    """Limit what all instances that have a share may have together; what is not given stays."""
    wanted = asked(PoolLimits, limits)
    if wanted is None:
        raise click.UsageError("give --max-concurrent, --budget or both")
    _run(installation, lambda c: accounts.limit_pool(c, wanted, actor=ACTOR, reason=reason))
    _told("the limits of all are set", as_json=as_json, **wanted.model_dump(exclude_unset=True))


@instance_group.command("list")
@as_json
@pass_installation
def list_instances(installation: Installation, as_json: bool) -> None:
    """List the instances."""
    found = _run(installation, instances.instances)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    columns = ["instance", "pool", "draining", "usage", "min", "max", "queued", "running", "weight", "used", "budget"]
    rows = [
        (each.name, each.pool, "yes" if each.draining else "no", each.usage, each.min_quota, each.max_quota,
         each.queued, each.running, each.credit_weight, each.used, each.budget)
        for each in found
    ]  # fmt: skip
    print_table(columns, rows)


@instance_group.command("usage")
@click.option("--hours", type=click.FloatRange(0, usage.MAX_HOURS), default=24.0, show_default=True)
@as_json
@pass_installation
def show_usage(installation: Installation, hours: float, as_json: bool) -> None:
    """Show what bots say the jobs at gates have used, in every unit."""
    found = _run(installation, lambda c: usage.reported(c, hours=hours))
    if as_json:
        print_json([asdict(each) for each in found])
        return
    print_table(
        ["instance", "unit", "amount", "jobs"], [(each.instance, each.unit, each.amount, each.jobs) for each in found]
    )


@click.group("quota")
def quota_group() -> None:
    """How many units each instance may have in each cohort."""


quota_group.add_command(set_owner_quota)
quota_group.add_command(set_project_quota)


@quota_group.command("set")
@click.argument("instance")
@cohort_option
@click.option("--min", "minimum", type=click.IntRange(0, quotas.MAX_QUOTA), metavar="UNITS", help="What it is owed.")
@click.option("--max", "maximum", callback=_maximum, metavar="UNITS", help="The most it gets; none = any number.")
@reason_option
@as_json
@pass_installation
def set_quota(
    installation: Installation,
    instance: str,
    cohort: str,
    minimum: int | None,
    maximum: int | str | None,
    reason: str,
    as_json: bool,
) -> None:
    """Set an instance's quota; what is not given stays. A maximum below its usage stops nothing, and nothing new
    starts."""
    check_name("INSTANCE", instance)
    if minimum is None and maximum is None:
        raise click.UsageError("give --min, --max or both")

    def work(connection: Connection) -> tuple[int, int | None]:
        least, most = quotas.limits_of(connection, cohort, instance)
        least = least if minimum is None else minimum
        most = most if maximum is None else None if isinstance(maximum, str) else maximum
        quotas.set_quota(connection, cohort, instance, minimum=least, maximum=most, actor=ACTOR, reason=reason)
        return least, most

    least, most = _run(installation, work)
    told = f"{instance} has a minimum of {least} and {'no maximum' if most is None else f'a maximum of {most}'}"
    _told(told, as_json=as_json, cohort=cohort, instance=instance, min=least, max=most)


@quota_group.command("list")
@as_json
@pass_installation
def list_quotas(installation: Installation, as_json: bool) -> None:
    """List the quotas, in units."""
    cooldown = installation.settings.quotas.eviction_cooldown
    found = _run(installation, lambda c: quotas.quotas(c, cooldown=cooldown))
    if as_json:
        print_json([asdict(each) for each in found])
        return
    rows = [
        (each.cohort, each.instance, each.usage, each.min_quota, each.max_quota, each.effective_max) for each in found
    ]
    print_table(["cohort", "instance", "usage", "min", "max", "effective max"], rows)


@quota_group.command("rm")
@click.argument("instance")
@cohort_option
@reason_option
@as_json
@pass_installation
def remove_quota(installation: Installation, instance: str, cohort: str, reason: str, as_json: bool) -> None:
    """Let an instance have any number of units in a cohort."""
    _run(installation, lambda c: quotas.remove_quota(c, cohort, instance, actor=ACTOR, reason=reason))
    _told(f"{instance} has no quota in {cohort}", as_json=as_json, cohort=cohort, instance=instance, removed=True)


@click.group("cohort")
def cohort_group() -> None:
    """Named sets of labels that part bots and jobs."""


@cohort_group.command("set")
@click.argument("name")
@click.option("--label", "labels", multiple=True, metavar="TEXT", help="All of its labels; repeatable.")
@click.option("--no-labels", is_flag=True, help="Of no labels.")
@click.option("--position", type=click.IntRange(0, cohorts.MAX_POSITION), help="Lower = asked sooner [last].")
@click.option("--reclaim-min", type=click.Choice(cohorts.RULES), help="What may be evicted for a minimum.")
@reason_option
@as_json
@pass_installation
def set_cohort(
    installation: Installation,
    name: str,
    labels: tuple[str, ...],
    no_labels: bool,
    position: int | None,
    reclaim_min: str | None,
    reason: str,
    as_json: bool,
) -> None:
    """Make a cohort or change it; what is not given stays. Bots and queued jobs move to the one that is theirs then."""
    if labels and no_labels:
        raise click.UsageError("give at most one of: --label, --no-labels")
    given = () if no_labels else labels or None
    _run(
        installation,
        lambda c: cohorts.put_cohort(
            c, name, labels=given, position=position, reclaim_min=reclaim_min, actor=ACTOR, reason=reason
        ),
    )
    _told(f"cohort {name} is set", as_json=as_json, name=name)


@cohort_group.command("list")
@as_json
@pass_installation
def list_cohorts(installation: Installation, as_json: bool) -> None:
    """List the cohorts in the order in which they are asked."""
    found = _run(installation, cohorts.cohorts)
    if as_json:
        print_json([asdict(each) for each in found])
        return
    print_table(
        ["cohort", "position", "reclaim min", "labels"],
        [
            (each.name, each.position if each.id else "last", each.reclaim_min, " ".join(each.labels) or None)
            for each in found
        ],
    )


@cohort_group.command("rm")
@click.argument("name")
@reason_option
@as_json
@pass_installation
def remove_cohort(installation: Installation, name: str, reason: str, as_json: bool) -> None:
    """Remove a cohort that has neither quotas nor running jobs."""
    _run(installation, lambda c: cohorts.remove_cohort(c, name, actor=ACTOR, reason=reason))
    _told(f"cohort {name} is removed", as_json=as_json, name=name, removed=True)
