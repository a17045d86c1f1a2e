"""When a waiting job will start, as far as that can be known: from its gates, its rivals and past errors.

The gates are those of `explain`. One that opens when leases end, such as bots without room, is what the formula is
about. One that time opens delays the start. Any other keeps the start unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from leasehold.states import WAITING
from pydantic import BaseModel, Field

from assigner import forecasting
from assigner.admission.gates import (
    ClassLimitGate,
    ClassReserveGate,
    ConcurrencyGate,
    LocksGate,
    ResourcesGate,
    SlotsGate,
)
from assigner.admission.rules import RULES, Rules
from assigner.explain import gates as explained_gates
from assigner.explain.gates import GateVerdict
from assigner.forecasting import Ahead, Forecast, Guesses, Prediction, Standing
from schema import predicates
from schema.accounting import forecasts
from schema.accounting.forecasts import MOST_AHEAD, Past, Place, Stored, Times
from schema.accounting.quotas import EVICTION_COOLDOWN, Cooldown
from schema.diagnostics import evidence as evidence_reads
from schema.postgres.connection import Connection

#: Gates that open when leases end.
_CONTENDED = frozenset(
    (
        predicates.ROOM.name,
        predicates.QUOTA.name,
        *(gate.name for gate in (
            ClassLimitGate, ClassReserveGate, ConcurrencyGate, LocksGate, ResourcesGate, SlotsGate)),
    )
)  # fmt: skip
NO_LEASES = "no lease like its own has ended lately"


class StartForecast(BaseModel):
    """When a waiting job will start. Without a time, `reason` says why."""

    seconds: float | None = Field(description="seconds from now until half of the jobs like it have started")
    upper_seconds: float | None = Field(description="seconds from now until 9 of 10 of the jobs like it have started")
    earliest_seconds: float | None = Field(
        default=None,
        description="seconds from now before which it does not start in any case; unset = it may start now",
    )
    reason: str | None = Field(description="why no time is known")
    misses_deadline: bool = Field(description="true: it would end after its deadline")
    sentence: str

    @classmethod
    def of(cls, told: Forecast) -> "StartForecast":
        """Make the answer of a forecast."""
        return cls(
            seconds=told.seconds,
            upper_seconds=told.upper,
            earliest_seconds=told.earliest,
            reason=told.reason,
            misses_deadline=told.misses_deadline,
            sentence=told.sentence,
        )


@dataclass(frozen=True)
class Foreseen:
    """A forecast, with what it was made from: the job's place, the formula's answer, all guesses, and how many past
    forecasts."""

    place: Place
    forecast: Forecast
    prediction: Prediction | None = None
    guesses: Guesses | None = None
    past: int = 0

    @property
    def stored(self) -> Stored:
        """What is stored of it."""
        place, made, told, guesses = self.place, self.prediction, self.forecast, self.guesses
        return Stored(
            id=place.id,
            cohort=place.cohort,
            instance=place.instance,
            job_class=place.job_class,
            past=self.past,
            predicted=None if made is None else made.seconds,
            scale=None if made is None else made.scale,
            by_rate=None if guesses is None else guesses.by_rate,
            by_waits=None if guesses is None else guesses.by_waits,
            seconds=told.seconds,
            upper=told.upper,
            reason=told.reason,
        )


def foresee(
    connection: Connection,
    job_id: int,
    judged: Sequence[GateVerdict] | None = None,
    *,
    everything: bool = True,
    cooldown: Cooldown = EVICTION_COOLDOWN,
    rules: Rules = RULES,
) -> Foreseen:
    """Foresee the start of a waiting job.

    judged: its gates; otherwise they are read, without asking checkers, and without `everything` only bots that serve
    its instance are told of.
    """
    if judged is None:
        job = evidence_reads.job(connection, job_id, cooldown=cooldown)
        [found] = evidence_reads.gather_briefly(connection, [job], everything=everything)
        own = explained_gates.judge_each_constraints(connection, [job_id], rules).get(job_id, ())
        judged = explained_gates.judge_gates(found, own)
    place = forecasts.place(connection, job_id)
    past = _past(connection, place)
    earliest = max((_opens_in(gate) or 0.0 for gate in judged if gate.is_open is False), default=0.0)
    blocked = [gate for gate in explained_gates.by_cause(judged) if _opens_in(gate) is None]
    if blocked:
        return Foreseen(place, Forecast(reason=_because(blocked), earliest=earliest or None), past=len(past))
    times = forecasts.times(connection, place.cohort)
    standing = _standing(connection, place, judged, times, earliest)
    if isinstance(standing, str):
        return Foreseen(place, Forecast(reason=standing, earliest=earliest or None), past=len(past))
    made = forecasting.predict(standing)
    latest = None if place.deadline is None else place.deadline - standing.seconds
    guesses = forecasting.guess(
        standing,
        made.seconds,
        per_second=sum(each.per_second for each in times.values()),
        waited=times[place.instance].waited if place.instance in times else None,
        age=place.age,
    )
    before = [(Guesses(each.predicted, each.by_rate, each.by_waits), each.waited) for each in past]
    scores = [forecasting.score(Prediction(each.predicted, each.scale), each.waited) for each in past]
    told = forecasting.promise(made, scores, middle=forecasting.weigh(guesses, before), deadline=latest)
    return Foreseen(place, replace(told, earliest=earliest or None), made, guesses, len(past))


def of_job(
    connection: Connection, job_id: int, state: str, *, everything: bool, cooldown: Cooldown, rules: Rules
) -> StartForecast | None:
    """Return the forecast of a job in this state; None if it does not wait."""
    if state not in WAITING:
        return None
    found = foresee(connection, job_id, everything=everything, cooldown=cooldown, rules=rules)
    return StartForecast.of(found.forecast)


def _because(blocked: Sequence[GateVerdict]) -> str:
    """The first of these gates in few words, or in a sentence where these would be none."""
    first = blocked[0]
    if first.name in (predicates.COHORT.name, predicates.REQUIREMENTS.name):
        return first.sentence
    return explained_gates.in_few_words(blocked) or first.sentence


def _opens_in(gate: GateVerdict) -> float | None:
    """The seconds for which a closed gate keeps the job in any case; None if nobody knows when it opens."""
    if gate.name in _CONTENDED:
        return 0.0
    if gate.name == predicates.BACKOFF.name:
        # A queue rests because no bot had room, and is woken by one that has.
        starts_at, rest = gate.evidence.get("starts_at"), gate.evidence["rest_seconds"]
        if starts_at is None and gate.evidence["considered"]:
            return 0.0
        return None if rest is None else float(rest)
    opens_in = gate.evidence.get("opens_in_seconds")
    return None if opens_in is None else float(opens_in)


def _standing(
    connection: Connection, place: Place, judged: Sequence[GateVerdict], times: Mapping[int, Times], earliest: float
) -> Standing | str:
    """Where the job stands, or why that is not known."""
    if not times:
        return NO_LEASES
    ahead = forecasts.ahead(connection, place)
    if ahead is None:
        return f"more than {MOST_AHEAD:,} jobs are ahead of it"
    units, free = forecasts.room(connection, place)
    if units < place.units:
        return "no such bot takes work"
    every = Times(
        1,
        forecasting.shares({name: (each.leases, each.seconds) for name, each in times.items()}),
        forecasting.shares({name: (each.leases, each.work) for name, each in times.items()}),
    )
    mine = times.get(place.instance, every)
    own, _ = ahead.get(place.instance, (0, None))
    later = forecasts.later(connection, place)
    rivals = {name: most for found in (ahead, later) for name, (_, most) in found.items() if name != place.instance}
    paces = [gate.evidence["per_second"] for gate in judged if "per_second" in gate.evidence]
    seconds = place.runs or mine.seconds
    return Standing(
        units=units,
        free=free,
        own=Ahead(own, mine.work, place.max_quota, later.get(place.instance, (0.0, None))[0]),
        others=[
            Ahead(ahead.get(name, (0, None))[0], times.get(name, every).work, most, later.get(name, (0.0, None))[0])
            for name, most in rivals.items()
        ],
        work=place.units * seconds,
        seconds=seconds,
        used=place.usage,
        earliest=earliest + (own / min(paces) if paces else 0.0),
    )


def _past(connection: Connection, place: Place) -> Sequence[Past]:
    """Past forecasts of jobs like it: of its instance and class, else its instance, else its cohort."""
    found = forecasts.past(connection, place, of_instance=True)
    like = [each for each in found if each.job_class == place.job_class]
    if len(like) >= forecasting.ENOUGH:
        return like
    return found if len(found) >= forecasting.ENOUGH else forecasts.past(connection, place, of_instance=False)
