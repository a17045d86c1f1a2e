"""Calls of `explain` in the test's process, and helpers that bring jobs and bots into the states to explain."""

from collections.abc import Mapping
from typing import Any

from assigner.admission.rules import RULES, Rules
from assigner.explain.answer import QUOTAS, Explanation, GateAnswer, explain
from assigner.preemption.plan import QuotaSettings
from schema.moves.waiting import hold
from tests.support.pool import Pool
from tests.support.tenancy import Tenancy

KEEP = """
UPDATE bots SET kept_units = :units, kept_until = now() + make_interval(secs => :seconds),
    kept_for = intern_instance(:instance)
WHERE name = :bot"""


def explained(
    pool: Pool,
    job: str,
    *,
    instances: list[str] | None = None,
    rules: Rules = RULES,
    quotas: QuotaSettings = QUOTAS,
) -> Explanation:
    """The explanation for an operator, or with `instances` for a submitter of these instances."""
    found = pool.database.run(
        lambda connection: explain(connection, job, instances=instances, rules=rules, quotas=quotas)
    )
    assert found is not None
    return found


def gates_of(found: Explanation) -> Mapping[str, GateAnswer]:
    """Name → answer of the gate."""
    return {one.gate: one for one in found.gates}


def closed(found: Explanation) -> list[str]:
    """The names of the closed gates, in their order."""
    return [one.gate for one in found.gates if one.open is False]


def cohort(pool: Pool, name: str, *labels: str) -> None:
    """Make a cohort with these labels, whose position is after all others."""
    pool.change(
        "INSERT INTO cohorts (name, labels, position) SELECT :name, CAST(:labels AS text[]), count(*) FROM cohorts",
        name=name,
        labels=list(labels),
    )


def rest(pool: Pool, job: str, seconds: float, *, looks: int = 2, reason: str = "no bot") -> None:
    """Let the queue of the job rest for `seconds` from now, or the job alone if nobody has looked into the queue."""
    values = {"job": job, "seconds": seconds, "reason": reason}
    rests = "SET schedule_after = now() + make_interval(secs => :seconds), reason = :reason"
    if looks == 0:
        pool.change(f"UPDATE jobs {rests} WHERE public_id = CAST(:job AS uuid)", **values)
    else:
        which = "id = (SELECT queue FROM jobs WHERE public_id = CAST(:job AS uuid))"
        pool.change(f"UPDATE queues {rests}, looks = :looks WHERE {which}", looks=looks, **values)


def park(pool: Pool, job: str, reason: str = "by hand") -> None:
    """Park the job as an operator."""
    pool.database.run(
        lambda connection: hold.park(connection, [job], instances=None, reason=reason, actor="operator:o")
    )


def keep(pool: Pool, bot: str, instance: str, *, units: int = 1, seconds: float = 30.0) -> None:
    """Keep units of the bot for the instance, as preemption does."""
    pool.change(KEEP, bot=bot, instance=instance, units=units, seconds=seconds)


def status(pool: Pool, bot: str, **columns: Any) -> None:
    """Set columns of the bot, as its own report or an operator would."""
    for column, value in columns.items():
        pool.change(f"UPDATE bots SET {column} = :value WHERE name = :bot", bot=bot, value=value)


def preempted(pool: Pool, tenancy: Tenancy) -> tuple[str, str]:
    """Make a job of team-a preempt a job of team-b. Returns the ids of both, first that of team-a."""
    tenancy.quota("team-a", minimum=1, maximum=5)
    (victim,) = pool.submit(instance="team-b", priority=10)
    bot = pool.bot("bot-1", capacity=1)
    pool.assigner().run_once()
    bot.take()
    (job,) = pool.submit(instance="team-a")
    pool.change("UPDATE jobs SET queued_at = queued_at - interval '21 s' WHERE state = 'queued'")
    tenancy.assigner(QuotaSettings(preemption_delay=20)).run_once()
    return job, victim
