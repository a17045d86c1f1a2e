"""What is stopped for a waiting job whose instance is below its minimum; if nothing is, why not."""

from collections import Counter

from leasehold.wire import escaped
from pydantic import BaseModel, Field

from assigner.preemption.plan import Protection, QuotaSettings, protection
from assigner.preemption.reclaim import Foreseen, foresee
from schema.postgres.connection import Connection
from schema.readable import duration, plural


class Preemption(BaseModel):
    """What is asked to stop for a job once it has waited for `preemption_delay`, or why nothing is."""

    jobs: list[str] = Field(description="ids of the jobs; empty for a submitter, who sees nothing of other tenants")
    sentence: str


def explain_minimum(
    connection: Connection, job_id: int, settings: QuotaSettings, *, sync: float, everything: bool
) -> Preemption | None:
    """Plan as a cycle does that finds the job after `preemption_delay`; None if its instance is not below its minimum.

    everything: True for an operator, who sees the bot and the jobs. sync: the bots' sync period, in seconds.
    """
    found = foresee(connection, job_id, settings, sync=sync)
    if found is None:
        return None
    job = found.job
    below = f"instance '{escaped(job.instance_name, 63)}' is below its minimum of {job.min_quota} with "
    below += plural(job.usage, "unit")
    if found.eviction is None:
        why = _why_not(found, settings, everything=everything)
        return Preemption(jobs=[], sentence=f"nothing is stopped for it although {below}: {why}")
    eviction, victims = found.eviction, found.eviction.victims if everything else ()
    told = "room would be made for it"
    if everything:
        of = plural(sum(each.units for each in victims), "unit")
        told = f"{plural(len(victims), 'job')} of {of} would be asked to stop on bot '{eviction.bot.name}'"
    delay = duration(settings.preemption_delay)
    sentence = f"{told}, by the rule {eviction.rule}, once it has waited {delay}: {below}"
    return Preemption(jobs=[each.public_id for each in victims], sentence=sentence)


def _why_not(found: Foreseen, settings: QuotaSettings, *, everything: bool) -> str:
    job = found.job
    if not settings.preemption:
        return "preemption is off"
    if job.units > job.short:
        return f"it takes {plural(job.units, 'unit')}, more than the {job.short} that are missing of the minimum"
    if any(bot.free_units >= job.units for bot in found.bots):
        return "a bot will have room for it"
    if not everything:
        return "the rules protect the jobs that run"
    held = (each for bot in found.bots for each in bot.occupants)
    counted = Counter(protection(job, each, settings, now=found.now, spare=each.spare) for each in held)
    free = counted.pop(None, 0)
    told = [_protected(why, number, settings) for why, number in counted.most_common() if why is not None]
    if free:
        told.append(f"the {plural(free, 'job')} that may be stopped would not free enough on one bot")
    return "; ".join(told) or "no bot that could run it has a job that may be stopped"


def _protected(why: Protection, number: int, settings: QuotaSettings) -> str:
    jobs, one = plural(number, "job"), number == 1
    match why:
        case Protection.OWN:
            return f"{jobs} {'is' if one else 'are'} of the same instance"
        case Protection.PASSING:
            return f"{jobs} only {'starts, or stops' if one else 'start, or stop'} already"
        case Protection.EVICTED:
            return f"{jobs} {'was' if one else 'were'} evicted {settings.max_evictions} times, as often as a job may be"
        case Protection.YOUNG:
            return f"{jobs} {'has' if one else 'have'} run for less than {duration(settings.min_run_time)}"
        case Protection.URGENT:
            return f"{jobs} {'is' if one else 'are'} not less urgent, and the rule of the cohort is lower_priority_only"
        case Protection.MINIMUM:
            return f"{jobs} {'is' if one else 'are'} of instances that would fall below their own minimum"
