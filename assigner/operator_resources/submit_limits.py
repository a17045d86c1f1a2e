"""Declarations of limits on what is submitted and reported: queue limits of instances, ceilings, rules."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, Field

from assigner.operator_resources.declaration import (
    ALL,
    SECONDS,
    By,
    Key,
    Keys,
    Removal,
    Request,
    Resource,
    Row,
    Setting,
    check_scope,
    given,
    one_of,
)
from assigner.operator_resources.limits import QueueLimitRequest
from schema.accounting import accounts
from schema.accounting.accounts import MAX_BUDGET
from schema.policy import ceilings, queue_limits, submit_rules
from schema.policy.ceilings import CeilingTerms, Scope
from schema.policy.submit_rules import SubmitRuleTerms
from schema.postgres.connection import Connection
from schema.readable import plural


class InstanceQueueLimit(Row):
    instance: str | None = Field(description="unset = each instance without a limit of its own")
    max_queued: int = given(unit="jobs", help="jobs that may wait, held jobs included")


def _set_instance_queue_limits(
    connection: Connection, wanted: Sequence[tuple[Keys, QueueLimitRequest]], by: By
) -> None:
    limits = {one_of(keys[0]): body.max_queued for keys, body in wanted}
    queue_limits.set_instance_queue_limits(connection, limits, **by)


def _whose_jobs(done: Mapping[str, Any]) -> str:
    return "each instance without a limit of its own" if done["instance"] is None else str(done["instance"])


INSTANCE_QUEUE_LIMITS = Resource(
    name="instance-queue-limit",
    command="limit instance-queue",
    plural="instance-queue-limits",
    help="How many jobs of an instance may wait.",
    keys=(Key("instance", "INSTANCE", check=check_scope, option="--instance", default=ALL, instance=True),),
    row=InstanceQueueLimit,
    rows=lambda connection, _: queue_limits.instance_queue_limits(connection),
    columns=(("instance", lambda row: row["instance"] or "each other"), ("max queued (jobs)", "max_queued")),
    set=Setting(
        help="Set how many jobs of an instance, or of each without a limit of its own, may wait. Submits beyond that"
        " are refused; jobs that wait already stay.",
        model=QueueLimitRequest,
        apply_all=_set_instance_queue_limits,
        arguments=("max_queued",),
        stops={"max_queued": "every submit to which this applies is refused"},
    ),
    printed=lambda done: f"{plural(done['max_queued'], 'job')} of {_whose_jobs(done)} may wait",
    remove=Removal(
        help="Remove the limit of an instance, for which the default then holds, or the default.",
        apply_all=lambda connection, names, by: queue_limits.remove_instance_queue_limits(
            connection, [one_of(keys[0]) for keys in names], **by
        ),
        printed="the queue limit is removed",
    ),
)


class CeilingRequest(CeilingTerms):
    model_config = ConfigDict(strict=True)

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class Ceiling(Row):
    instance: str | None = Field(description="unset = all instances")
    label: str | None = Field(description="unset = all jobs")
    default_timeout: float | None = given(unit=SECONDS, help="longest run time of a job that gives none; unset = none")
    max_timeout: float | None = given(unit=SECONDS, help="longest run time that a job may have; unset = any")
    max_queue_age: float | None = given(unit=SECONDS, help="longest wait for a job's first start; unset = any")


def _check_label_scope(field: str, value: str) -> None:
    if value != ALL:
        queue_limits.check_label(field, value)


def _scope(keys: Keys) -> Scope:
    return one_of(keys[0]), one_of(keys[1])


def _set_ceilings(
    connection: Connection, wanted: Sequence[tuple[Keys, CeilingRequest]], by: By
) -> Sequence[Mapping[str, Any]]:
    return ceilings.set_ceilings(connection, {_scope(keys): body for keys, body in wanted}, **by)


def _told_of_ceiling(done: Mapping[str, Any]) -> str:
    whose = f" of {done['instance']}" if done["instance"] else ""
    labelled = f" with the label {done['label']}" if done["label"] else ""
    most, age = (
        "any time" if done[name] is None else f"at most {done[name]:g} s" for name in ("max_timeout", "max_queue_age")
    )
    default = "" if done["default_timeout"] is None else f" ({done['default_timeout']:g} s by default)"
    return f"jobs{whose}{labelled} run for {most}{default} and wait for {age}"


CEILINGS = Resource(
    name="ceiling",
    command="limit ceiling",
    plural="ceilings",
    help="The default and the longest run time of jobs, and the longest time that they may wait.",
    keys=(
        Key("instance", "INSTANCE", check=check_scope, option="--instance", default=ALL, instance=True),
        Key("label", "LABEL", check=_check_label_scope, option="--label", default=ALL, slashes=True),
    ),
    row=Ceiling,
    rows=lambda connection, _: ceilings.ceilings(connection),
    columns=(
        ("instance", lambda row: row["instance"] or "all"),
        ("label", lambda row: row["label"] or "all"),
        ("default timeout (s)", "default_timeout"),
        ("max timeout (s)", "max_timeout"),
        ("max queue age (s)", "max_queue_age"),
    ),
    set=Setting(
        help="Set ceilings for the pool, an instance, a label or both; what is not given stays. The tightest holds.",
        model=CeilingRequest,
        apply_all=_set_ceilings,
        partial=True,
    ),
    printed=_told_of_ceiling,
    remove=Removal(
        help="Remove the ceilings of the pool, an instance, a label or both.",
        apply_all=lambda connection, names, by: ceilings.remove_ceilings(connection, list(map(_scope, names)), **by),
        printed="the ceiling is removed",
    ),
)


class SubmitRuleRequest(SubmitRuleTerms):
    model_config = ConfigDict(strict=True)

    reason: str = Field(default="", description="for the audit; at most 500 bytes")


class SubmitRule(Row):
    instance: str | None = Field(description="unset = all instances")
    property_keys: list[str] | None = Field(description="the only property keys that jobs may name; unset = any")
    commands: list[str] | None = Field(description="the only programs that jobs may run; unset = any")
    owner_cost: float | None = given(unit="cost", help="cost above which an owner is heavy; unset = no owner is")
    owner_penalty: int | None = given(unit="steps", help="what jobs of a heavy owner are put back; unset = refused")


def _set_submit_rules(
    connection: Connection, wanted: Sequence[tuple[Keys, SubmitRuleRequest]], by: By
) -> Sequence[Mapping[str, Any]]:
    return submit_rules.set_submit_rules(connection, {one_of(keys[0]): body for keys, body in wanted}, **by)


def _any(value: list[str] | None) -> object:
    return "any" if value is None else value


SUBMIT_RULES = Resource(
    name="submit-rule",
    command="rule submit",
    plural="submit-rules",
    help="What is refused when it is submitted: property keys, programs, jobs of owners that have used much.",
    keys=(Key("instance", "INSTANCE", check=check_scope, option="--instance", default=ALL, instance=True),),
    row=SubmitRule,
    rows=lambda connection, _: submit_rules.submit_rules(connection),
    columns=(
        ("instance", lambda row: row["instance"] or "all"),
        ("property keys", lambda row: _any(row["property_keys"])),
        ("commands", lambda row: _any(row["commands"])),
        ("owner cost (cost)", "owner_cost"),
        ("owner penalty (steps)", "owner_penalty"),
    ),
    set=Setting(
        help="Set the rule of the pool or of an instance; what is not given stays. A job must pass both.",
        model=SubmitRuleRequest,
        apply_all=_set_submit_rules,
        partial=True,
        options={"property_keys": "--property-key", "commands": "--command"},
        switches={"--any-property": ("property_keys", None), "--any-command": ("commands", None)},
    ),
    printed=lambda done: f"the submit rule of {done['instance'] or 'the pool'} is set",
    remove=Removal(
        help="Remove the rule of the pool or of an instance.",
        apply_all=lambda connection, names, by: submit_rules.remove_submit_rules(
            connection, [one_of(keys[0]) for keys in names], **by
        ),
        printed="the submit rule is removed",
    ),
)


class ReportCeilingRequest(Request):
    amount: float = given(unit="the unit of the report", help="most that one attempt counts for", ge=0, le=MAX_BUDGET)


class ReportCeiling(Row):
    instance: str
    unit: str = Field(description="unit in which commands report what they used")
    amount: float | None = given(
        unit="the unit of the report", help="most that one attempt counts for; unset = what is stored is no number"
    )


def _set_report_ceiling(connection: Connection, keys: Keys, body: ReportCeilingRequest, by: By) -> None:
    accounts.set_report_ceiling(connection, keys[0], keys[1], body.amount, **by)


REPORT_CEILINGS = Resource(
    name="report-ceiling",
    command="limit report",
    plural="report-ceilings",
    help="The most that one attempt of an instance may report of a unit.",
    keys=(Key("instance", "INSTANCE", instance=True), Key("unit", "UNIT")),
    row=ReportCeiling,
    rows=lambda connection, _: accounts.report_ceilings(connection),
    columns=(("instance", "instance"), ("unit", "unit"), ("amount (of the unit)", "amount")),
    set=Setting(
        help="Set the most that one attempt's report counts for. What it reports beyond that is cut, with an event.",
        model=ReportCeilingRequest,
        apply=_set_report_ceiling,
        arguments=("amount",),
    ),
    printed=lambda done: f"one attempt of {done['instance']} counts for at most {done['amount']:g} {done['unit']}",
    remove=Removal(
        help="Let reports of a unit count in full.",
        apply=lambda connection, keys, by: accounts.remove_report_ceiling(connection, keys[0], keys[1], **by),
        printed="reports of {unit} by {instance} count in full",
    ),
)

RESOURCES: tuple[Resource[Any], ...] = (INSTANCE_QUEUE_LIMITS, CEILINGS, SUBMIT_RULES, REPORT_CEILINGS)
