"""Declarations of tenancy: instances, their shares, cohorts, and quotas of units and of cost."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from leasehold.errors import BadInput
from pydantic import ConfigDict, Field

from assigner.operator_resources import effects
from assigner.operator_resources.declaration import (
    By,
    Fields,
    Irremovable,
    Key,
    Keys,
    Page,
    Removal,
    Request,
    Resource,
    Row,
    Setting,
    given,
)
from schema.accounting import accounts, counters, quotas
from schema.accounting.accounts import Account
from schema.accounting.counters import COST_OF_OWNER, COST_OF_PROJECT, MAX_COST, CounterFamily
from schema.accounting.quotas import QuotaChange
from schema.fields import Name
from schema.postgres.connection import Connection
from schema.tenancy import cohorts, instances

_REASON = Field(default="", description="for the audit; at most 500 bytes")
#: Fields that make up a share.
_SHARE = frozenset(Account.model_fields)
_SHARE_OPTIONS = {"locks": "--lock"}


class InstanceRequest(Request):
    pool: str | None = Field(default=None, description="its pool; unset = none")


class InstanceChange(Account):
    model_config = ConfigDict(strict=True)

    pool: Name | None = Field(default=None, description="its pool: bots of a pool serve all its instances; null = none")
    share: bool = Field(default=True, description="false = remove its share of the pool and its limits")
    reason: str = _REASON


class Instance(Row):
    name: str
    pool: str | None = Field(description="its pool: bots of a pool serve all its instances; unset = none")
    draining: bool = Field(description="none of its jobs start")
    usage: int | None = given(unit="units", help="in use, in all cohorts where it has a quota; unset = no quota")
    min_quota: int | None = given(unit="units", help="guaranteed minimum, over all its quotas")
    max_quota: int | None = given(unit="units", help="maximum over all its quotas; unset = any number")
    queued: int = given(unit="jobs", help=f"counted up to {instances.MAX_COUNTED}")
    running: int = given(unit="jobs", help=f"counted up to {instances.MAX_COUNTED}")
    weight: float | None = Field(description="its weight beside other instances; unset = it is not managed")
    unit: str | None = Field(description="unit that its budget counts")
    used: float | None = given(unit="cost", help="within the rolling window, reservations of running jobs included")
    budget: float | None = given(unit="cost", help="its limit; unset = any amount, also for the limits that follow")
    max_concurrent: float | None = given(unit="jobs", help="jobs that may run at once")
    slots: float | None = given(unit="jobs", help="slots in which its jobs work")


def _parts(body: InstanceChange) -> set[str]:
    """Return the fields of its share that a request gives."""
    return body.model_fields_set & _SHARE


def _change_instance(connection: Connection, keys: Keys, body: InstanceChange, by: By) -> None:
    if not body.share and _parts(body):
        raise BadInput("share", "is false, which means nothing together with a part of a share")
    if "pool" in body.model_fields_set:
        instances.put_instance(connection, keys[0], pool=body.pool, **by)
    else:
        instances.require(connection, keys[0], create=True, **by)
    if not body.share:
        accounts.remove_account(connection, keys[0], **by)
    elif _parts(body):
        accounts.put_account(connection, keys[0], body, **by)


def _change_instances(connection: Connection, wanted: Sequence[tuple[Keys, InstanceChange]], by: By) -> None:
    """Change instances. Where only the pool is given, the instances are changed together."""
    if pools := {keys[0]: body.pool for keys, body in wanted if body.model_fields_set == {"pool"}}:
        instances.put_instances(connection, pools, **by)
    for keys, body in wanted:
        if keys[0] not in pools:
            _change_instance(connection, keys, body, by)


def _put_instance(connection: Connection, keys: Keys, body: InstanceRequest, by: By) -> None:
    instances.put_instance(connection, keys[0], pool=body.pool, **by)


def _claimed_share(keys: Keys, body: Account) -> dict[str, Sequence[str]]:
    return {"account": keys, "lock": [f"{keys[0]}/{lock}" for lock in body.locks]}


def _claimed_by_change(keys: Keys, body: InstanceChange) -> Mapping[str, Sequence[str]]:
    pool = {"instance": keys} if "pool" in body.model_fields_set else {}
    return pool | (_claimed_share(keys, body) if _parts(body) or not body.share else {})


def _told(value: object) -> str:
    if isinstance(value, dict):
        return " and ".join(f"{name} {slots}" for name, slots in value.items()) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _told_of_instance(done: Mapping[str, Any]) -> str:
    said = [f"{done['name']} is of {'pool ' + done['pool'] if done['pool'] else 'no pool'}"] if "pool" in done else []
    if done.get("share") is False:
        said.append(f"{done['name']} has no share")
    elif given := [name for name in done if name in _SHARE]:
        values = ", ".join(f"{name.replace('_', ' ')} {_told(done[name])}" for name in given)
        said.append(f"the share of {done['name']} is set: {values}")
    return "\n".join(said) or f"instance {done['name']} is there"


INSTANCES = Resource(
    name="instance",
    plural="instances",
    help="The instances that share the pool.",
    keys=(Key("name", "NAME"),),
    row=Instance,
    rows=lambda connection, page: instances.instances(connection, after=page.after, limit=page.limit),
    show=lambda connection, keys, _: instances.instance(connection, keys[0]),
    columns=(
        ("instance", "name"),
        ("pool", "pool"),
        ("draining", "draining"),
        ("usage (units)", "usage"),
        ("min (units)", "min_quota"),
        ("max (units)", "max_quota"),
        ("queued", "queued"),
        ("running", "running"),
        ("weight", "weight"),
        ("unit", "unit"),
        ("used", "used"),
        ("budget", "budget"),
        ("max concurrent", "max_concurrent"),
        ("slots", "slots"),
    ),
    set=Setting(
        help="Make an instance, or change its pool or its share; fields that are not given stay.",
        model=InstanceChange,
        apply_all=_change_instances,
        method="PATCH",
        partial=True,
        claims=_claimed_by_change,
        may_be_empty=True,
        options=_SHARE_OPTIONS,
        switches={"--no-pool": ("pool", None), "--no-share": ("share", False)},
        stops={
            "max_concurrent": "none of its jobs starts while it may run 0",
            "budget": "none of its jobs starts while they may cost 0",
            "slots": "none of its jobs starts while it has 0 slots",
            "weight": "a weight of 0 leaves it what other instances do not want",
        },
    ),
    older=(Setting(help="Make an instance, or change its pool.", model=InstanceRequest, apply=_put_instance),),
    printed=_told_of_instance,
    remove=Irremovable("jobs and their history name it; drain it, and remove its quotas and its share"),
    paged=True,
    section="[[instances]]",
    effect=lambda connection, _, change: effects.of_share(connection, change),
)


class AccountRequest(Account):
    model_config = ConfigDict(strict=True)

    reason: str = _REASON


class Share(Row):
    name: str = Field(description="the instance")
    weight: float = Field(description="its weight beside other instances; 0 = only what they leave")
    unit: str = Field(description="unit that its budget counts")
    used: float | None = given(unit="cost", help="within the rolling window, reservations of running jobs included")
    budget: float | None = given(unit="cost", help="its limit; unset = any amount, also for the limits that follow")
    running: float | None = given(unit="jobs", help="jobs that run")
    max_concurrent: float | None = given(unit="jobs", help="jobs that may run at once")
    slots: float | None = given(unit="jobs", help="slots in which its jobs work")


def _set_accounts(connection: Connection, wanted: Sequence[tuple[Keys, AccountRequest]], by: By) -> None:
    accounts.put_accounts(connection, {keys[0]: body for keys, body in wanted}, **by)


ACCOUNTS = Resource(
    name="account",
    command="",
    plural="accounts",
    help="The shares of the pool that instances have, with their limits.",
    keys=(Key("name", "NAME", instance=True),),
    path="/instances/{name}/account",
    row=Share,
    rows=lambda connection, _: accounts.accounts(connection),
    columns=(
        ("instance", "name"),
        ("weight", "weight"),
        ("unit", "unit"),
        ("used", "used"),
        ("budget", "budget"),
        ("running jobs", "running"),
        ("max concurrent jobs", "max_concurrent"),
        ("slots (jobs)", "slots"),
    ),
    set=Setting(
        help="Give an instance a share of the pool, or change it. Fields not given stay; null removes a limit.",
        model=AccountRequest,
        apply_all=_set_accounts,
        partial=True,
        claims=_claimed_share,
        options=_SHARE_OPTIONS,
    ),
    printed=lambda done: f"the share of {done['name']} is set",
    remove=Removal(
        help="Remove an instance's share and its limits: it is no longer managed.",
        apply_all=lambda connection, names, by: accounts.remove_accounts(connection, [keys[0] for keys in names], **by),
        printed="{name} has no share",
    ),
    section="[[instances]]",
)


class CohortRequest(Request):
    labels: list[str] | None = Field(default=None, max_length=cohorts.MAX_LABELS, description="unset = as before")
    position: int | None = Field(default=None, ge=0, le=cohorts.MAX_POSITION, description="lower = considered sooner")
    reclaim_min: str | None = Field(
        default=None,
        description="jobs that may be evicted for a minimum: lower_priority_only or any; unset = as before",
    )


class Cohort(Row):
    id: int = Field(description="0 is the default cohort")
    name: str
    labels: list[str]
    reclaim_min: str = Field(description="jobs that may be evicted for a minimum")
    position: int = Field(description="lower = considered sooner; the default cohort comes last")


def _set_cohort(connection: Connection, keys: Keys, body: CohortRequest, by: By) -> None:
    cohorts.put_cohort(
        connection, keys[0], labels=body.labels, position=body.position, reclaim_min=body.reclaim_min, **by
    )


COHORTS = Resource(
    name="cohort",
    plural="cohorts",
    help="Named sets of labels that group bots and jobs.",
    keys=(Key("name", "NAME"),),
    row=Cohort,
    rows=lambda connection, _: cohorts.cohorts(connection),
    columns=(
        ("cohort", "name"),
        ("position", lambda row: row["position"] if row["id"] else "last"),
        ("reclaim min", "reclaim_min"),
        ("labels", "labels"),
    ),
    set=Setting(
        help="Make a cohort, or change it; fields that are not given stay. Bots and queued jobs move accordingly.",
        model=CohortRequest,
        apply=_set_cohort,
        partial=True,
        may_be_empty=True,
        options={"labels": "--label"},
        switches={"--no-labels": ("labels", [])},
    ),
    printed=lambda done: f"cohort {done['name']} is set",
    remove=Removal(
        help="Remove a cohort that has neither quotas nor running jobs.",
        apply=lambda connection, keys, by: cohorts.remove_cohort(connection, keys[0], **by),
        printed="cohort {name} is removed",
    ),
    section="[[cohorts]]",
)


class QuotaRequest(Request):
    min: int = given(0, unit="units", help="guaranteed minimum", ge=0, le=quotas.MAX_QUOTA)
    max: int | None = given(None, unit="units", help="maximum; unset = any number", ge=0, le=quotas.MAX_QUOTA)


class Quota(Row):
    """The quota of an instance in a cohort, in units."""

    cohort: str
    instance: str
    min_quota: int = given(unit="units", help="guaranteed minimum")
    max_quota: int | None = given(unit="units", help="maximum; unset = no maximum")
    usage: int = given(unit="units", help="units in use")
    effective_max: int | None = given(unit="units", help="the maximum now, less recent evictions if others wait")


def _put_quota(connection: Connection, keys: Keys, body: QuotaRequest, by: By) -> None:
    quotas.set_quota(connection, *keys, minimum=body.min, maximum=body.max, **by)


def _change_quotas(connection: Connection, wanted: Sequence[tuple[Keys, QuotaRequest]], by: By) -> Sequence[Fields]:
    return quotas.change_quotas(connection, [_quota_change(keys, body) for keys, body in wanted], **by)


def _quota_change(keys: Keys, body: QuotaRequest) -> QuotaChange:
    cohort, instance = keys
    return QuotaChange(cohort, instance, body.model_dump(include={"min", "max"}, exclude_unset=True))


def _remove_quotas(connection: Connection, names: Sequence[Keys], by: By) -> None:
    quotas.remove_quotas(connection, [(cohort, instance) for cohort, instance in names], **by)


def _told_of_quota(done: Mapping[str, Any]) -> str:
    most = "no maximum" if done["max"] is None else f"a maximum of {done['max']}"
    return f"{done['instance']} has a minimum of {done['min']} and {most}"


QUOTAS = Resource(
    name="quota",
    plural="quotas",
    help="How many units each instance may have in each cohort.",
    keys=(
        Key("cohort", "NAME", option="--cohort", default=cohorts.DEFAULT),
        Key("instance", "INSTANCE", instance=True),
    ),
    row=Quota,
    rows=lambda connection, page: quotas.quotas(connection, cooldown=page.cooldown),
    columns=(
        ("cohort", "cohort"),
        ("instance", "instance"),
        ("usage (units)", "usage"),
        ("min (units)", "min_quota"),
        ("max (units)", "max_quota"),
        ("effective max (units)", "effective_max"),
    ),
    set=Setting(
        help="Change an instance's quota; fields not given stay. A maximum below its usage stops no running job.",
        model=QuotaRequest,
        apply_all=_change_quotas,
        method="PATCH",
        partial=True,
        stops={"max": "none of its jobs starts in this cohort while its maximum is 0"},
        foreseen=frozenset({"min"}),
    ),
    older=(
        Setting(
            help="Set an instance's quota in a cohort. A maximum below its usage stops no running job.",
            model=QuotaRequest,
            apply=_put_quota,
        ),
    ),
    printed=_told_of_quota,
    remove=Removal(
        help="Let an instance have any number of units in a cohort.",
        apply_all=_remove_quotas,
        printed="{instance} has no quota in {cohort}",
    ),
    section="[[instances]]",
    effect=lambda connection, page, change: effects.of_quota(connection, change, cooldown=page.cooldown),
)


class CostRequest(Request):
    cost: float | None = given(unit="cost", help="most within the rolling window; null = any amount", ge=0, le=MAX_COST)


class OwnerQuota(Row):
    instance: str
    owner: str
    used: float = given(unit="cost", help="within the rolling window, reservations of running jobs included")
    cost: float | None = given(unit="cost", help="maximum within the rolling window")


class ProjectQuota(Row):
    instance: str
    project: str
    used: float = given(unit="cost", help="within the rolling window, reservations of running jobs included")
    cost: float | None = given(unit="cost", help="maximum within the rolling window")


def _cost_quotas(connection: Connection, _: Page, *, family: CounterFamily) -> list[dict[str, Any]]:
    return [
        {"instance": each.names[0], family.noun: each.names[1], "used": each.used, "cost": each.most}
        for each in counters.limits(connection, family)
    ]


def _set_costs(
    connection: Connection, wanted: Sequence[tuple[Keys, CostRequest]], by: By, *, family: CounterFamily
) -> None:
    counters.set_limits(connection, family, {tuple(keys): body.cost for keys, body in wanted}, **by)


def _cost_resource(family: CounterFamily, row: type[Row]) -> Resource[Any]:
    noun = family.noun

    def printed(done: Mapping[str, Any]) -> str:
        cost = "any amount" if done["cost"] is None else f"{done['cost']:g}"
        return f"{noun} {done[noun]} of {done['instance']} may cost {cost}"

    return Resource(
        name=f"{noun}-quota",
        command=f"limit {noun}",
        plural=f"{noun}-quotas",
        help=f"How much the jobs of one {noun} may cost within the window.",
        keys=(Key("instance", "INSTANCE", instance=True), Key(noun, "NAME")),
        row=row,
        rows=partial(_cost_quotas, family=family),
        columns=(
            ("instance", "instance"),
            (noun, noun),
            ("used (cost)", "used"),
            ("max (cost)", "cost"),
        ),
        set=Setting(
            help=f"Set how much the jobs of one {noun} may cost within the window; none = any amount.",
            model=CostRequest,
            apply_all=partial(_set_costs, family=family),
            arguments=("cost",),
            stops={"cost": "none of these jobs starts while they may cost 0"},
        ),
        printed=printed,
        remove=Removal(
            help=f"Let the jobs of a {noun} cost any amount.",
            apply_all=lambda connection, names, by: counters.remove_limits(connection, family, names, **by),
            printed=f"{noun} {{{noun}}} of {{instance}} may cost any amount",
        ),
    )


OWNER_QUOTAS = _cost_resource(COST_OF_OWNER, OwnerQuota)
PROJECT_QUOTAS = _cost_resource(COST_OF_PROJECT, ProjectQuota)

RESOURCES: tuple[Resource[Any], ...] = (INSTANCES, ACCOUNTS, COHORTS, QUOTAS, OWNER_QUOTAS, PROJECT_QUOTAS)
