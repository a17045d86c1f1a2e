"""Replay of a past: the jobs of a real pool arrive again on a simulated one, at their own times, under some policy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import groupby
from statistics import median
from typing import Protocol

from leasehold.errors import BadInput

from assigner.admission.checkers import CheckerSettings
from assigner.operator_resources.versions import restore
from assigner.settings import PoolSettings
from assigner.simulation.loop import Bots, SimulatedPool, living
from assigner.simulation.past import Attempt, Past, PastJob
from assigner.simulation.records import Records, read_records
from assigner.simulation.report import Measured, measure
from schema.moves.cancel import cancel
from schema.moves.in_force import put_in_force
from schema.moves.submit import submit_at_once
from schema.policy.versions import Content
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.readable import duration

ACTOR = "simulation"
#: The word with which the command of a replayed job begins; its number follows.
PROGRAM = "simulated"
#: Seconds between two rounds of upkeep while nothing is due earlier.
UPKEEP_EVERY = 60.0

#: The longest step that is taken by default, in seconds.
LONGEST_STEP = 5.0
#: The fewest steps of a span. A search replays a fifth of it first.
FEWEST_STEPS = 10
#: Seconds. A step is a multiple of it, unless that would change it by more than a tenth.
GRAIN = 1 / 64

#: Resources that only refuse what is submitted; the past was submitted.
OF_SUBMITS = frozenset({"queue-limit", "instance-queue-limit", "ceiling", "submit-rule", "report-ceiling"})
#: No meter is read in a simulation.
NO_METER = {"meter": None, "usage_threshold": None}

#: Says how the attempt of a command goes, counted from 1.
How = Callable[[Sequence[str], int], Attempt]


#: Takes what bots do at a virtual time.
Plan = Callable[[float, Callable[[], object]], None]


class BotsOf(Protocol):
    """Makes bots like those of a past in the database of a simulated pool, and plans which come and leave later."""

    def __call__(
        self, database: Database, *, settings: PoolSettings, past: Past, how: How, seed: int, step: float, plan: Plan
    ) -> Bots: ...


@dataclass(frozen=True)
class Replayed:
    """What a replay did, and its figures. The jobs have their names of the past."""

    records: Records
    measured: Measured


def replay(
    past: Past,
    settings: PoolSettings,
    url: str,
    bots_of: BotsOf,
    *,
    seed: int,
    step: float,
    limits: Content | None = None,
) -> Replayed:
    """Let the past happen again under `settings`, in the empty database of `url`, and measure it.

    The limits that operators had set by commands stay in force, or those of a version of the policy are; what the
    settings declare takes the place of what the configuration had declared. step: seconds, as of `SimulatedPool`,
    made exact by `exact_step`. A run takes a multiple of it, the one above or the one below its time by
    chance: so runs are right on average.
    """
    step = exact_step(step)
    wanted = _as_simulated(settings, past)
    later: list[tuple[float, Callable[[], object]]] = []

    def plan(at: float, act: Callable[[], object]) -> None:
        later.append((at, act))

    how = partial(_how, past, seed, step)
    bots = partial(bots_of, settings=wanted, past=past, how=how, seed=seed, step=step, plan=plan)
    prepare = partial(_put_limits, past=past, limits=limits)
    names: dict[str, str] = {}
    living_so = partial(living, upkeep_every=UPKEEP_EVERY, step=step, foresees=False, prepare=prepare)
    with living_so(url, wanted, bots, start=past.since, seed=seed) as (pool, _):
        for at, act in later:
            pool.at(at, act)
        take = partial(_arrive, pool, names)
        for number, job in enumerate(past.jobs):
            pool.arrive(job.arrived, ((number, job),), take)
        pool.run(past.until)
        span = {"since": past.judged_from or past.since, "until": past.until, "waits_from": past.since}
        found = pool.database.run(lambda connection: read_records(connection, **span))
    jobs_found = [replace(job, name=names[job.name]) for job in found.jobs]
    leases = [replace(lease, job=names[lease.job]) for lease in found.leases]
    records = replace(found, jobs=jobs_found, leases=leases)
    return Replayed(records, measured_of(past, records))


def measured_of(past: Past, records: Records) -> Measured:
    """Return the figures of what a pool did with this past. Jobs that ran at the begin did not wait in it."""
    return measure(records, without={job.name for job in past.jobs if job.begun})


def _put_limits(connection: Connection, past: Past, limits: Content | None) -> None:
    """Put the limits of the past into force, and of a version all that does not only refuse what is submitted."""
    put_in_force(connection, past.in_force)
    if limits is not None:
        kept = {name: terms for name, terms in limits["limits"].items() if name not in OF_SUBMITS}
        kept["window"] = {name: {**terms, **NO_METER} for name, terms in kept.get("window", {}).items()}
        # As if a file had declared nothing: the settings declare nothing either, and must not remove what is there.
        restore(connection, {**limits, "limits": kept, "declared": {}}, actor=ACTOR, reason="")


def _as_simulated(settings: PoolSettings, past: Past) -> PoolSettings:
    """The settings without what submits anything, refuses submits, asks others, or forgets jobs within the span."""
    kept = {name: past.until - past.since + value for name, value in settings.upkeep if name.startswith("keep_")}
    windows = tuple(each.model_copy(update=NO_METER) for each in settings.windows)
    return settings.model_copy(
        update={
            **dict.fromkeys(("schedules", "queues", "meters", "webhooks"), ()),
            "checkers": CheckerSettings(),
            "windows": windows,
            "upkeep": settings.upkeep.model_copy(update=kept),
        }
    )


def step_of(past: Past, wanted: float | None) -> float:
    """Return the seconds of a step: what is wanted, or what changes no wait that matters.

    That is a twentieth of the median run time, at most 5. Raises BadInput `--step` for more than FEWEST_STEPS allow.
    """
    longest = (past.until - past.since) / FEWEST_STEPS
    if wanted is not None:
        if wanted > longest:
            raise BadInput("--step", f"must be at most {duration(longest)}, a tenth of what is repeated")
        return wanted
    return min(LONGEST_STEP, longest, max(0.001, median(job.attempts[-1].seconds for job in past.jobs) / 20.0))


def exact_step(step: float) -> float:
    """Return the nearest step whose multiples have exact sums, here and in the whole microseconds of the database.

    If they had not, what belongs to one stop of the clock would come at two, less than a microsecond apart. A step that
    this would change by more than a tenth stays as it is.
    """
    exact = round(step / GRAIN) * GRAIN
    return exact if abs(exact - step) <= step / 10 else step


def _how(past: Past, seed: int, step: float, command: Sequence[str], attempt: int) -> Attempt:
    attempts = past.jobs[int(command[1])].attempts
    real = attempts[min(attempt, len(attempts)) - 1]
    # Of the digest, because to seed a generator for one number takes ten times as long.
    chance = int.from_bytes(blake2b(f"{seed} {command[1]} {attempt}".encode(), digest_size=6).digest()) / 2**48
    return Attempt(math.floor(real.seconds / step + chance) * step, real.verdict)


def _arrive(pool: SimulatedPool, names: dict[str, str], arrived: Sequence[tuple[int, PastJob]]) -> None:
    """Submit the jobs, note their names, and plan the cancels of those that never ran.

    Jobs with a deduplication key are submitted one by one, because one may join or replace another.
    """
    for is_alone, group in groupby(arrived, key=lambda each: each[1].request.get("dedup_key") is not None):
        together = [*group]
        for part in [[each] for each in together] if is_alone else [together]:
            requests = [_request(number, job) for number, job in part]
            made = pool.database.run_alone(partial(submit_at_once, requests=requests, actor=ACTOR))
            for (_, job), each in zip(part, made, strict=True):
                names[str(each.job_id)] = job.name
                if job.cancelled is not None:
                    pool.at(job.cancelled, partial(_cancel, pool, each.public_id))


def _request(number: int, job: PastJob) -> dict[str, object]:
    """The request of the job, whose command tells its number. It is tried as often as it was, without a time-out."""
    own = {name: value for name, value in job.request.items() if name not in ("from", "timeout_seconds", "metadata")}
    tries = {"retry_failed": True, "max_attempts": len(job.attempts)} if job.is_over else {}
    return {**own, **tries, "payload": {"command": [PROGRAM, str(number)]}}


def _cancel(pool: SimulatedPool, public_id: str) -> None:
    sync = pool.settings.timing.sync
    pool.database.run(lambda c: cancel(c, [public_id], instances=None, sync=sync, actor=ACTOR))
