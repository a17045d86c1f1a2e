"""Operators' routes for the settings in force, and for trying other weights on sampled decisions."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request
from leasehold.errors import BadInput, NotFound
from pydantic import BaseModel, Field, ValidationError

from assigner.api.routing import OPERATORS, Read, problems
from assigner.api.submission import RequestModel
from assigner.placement.decision_sample import BY_WEIGHTS, Rescored, Seen, rescore
from assigner.placement.registry import StrategySettings
from assigner.placement.strategy import CapacityTerm, Score, Weights
from schema.fields import first_error
from schema.postgres.connection import Connection
from schema.tenancy import processes
from schema.tenancy.processes import MAX_DECISIONS, DecisionRow

#: The most rows of settings in one answer.
MAX_SETTINGS = 100
#: The largest absolute value of a weight that is tried.
LARGEST = 1e6


class SettingsInForce(BaseModel):
    """Settings that one or more live processes of one kind have in common."""

    kind: str = Field(description="assigner or gateway")
    processes: list[str]
    file: str | None = Field(description="the configuration file; unset = defaults and the environment")
    error: str | None = Field(description="why the file as it is now was refused; unset = it was not")
    changed_at: datetime = Field(description="since when these settings are in force")
    settings: dict[str, Any] = Field(description="by section, without secrets")


class SettingsList(BaseModel):
    """Settings in force, by kind of process; several rows of a kind mean that its processes do not agree."""

    settings: list[SettingsInForce]


class Decision(BaseModel):
    """A sampled decision: which job went to which bot, and how many candidates there were."""

    id: int
    at: datetime
    assigner: str
    job: UUID
    bot: str
    strategy: str
    candidates: int


class DecisionList(BaseModel):
    """Sampled decisions, newest first. For the next page, give the id of the last one as `before`."""

    decisions: list[Decision]


Weight = Annotated[float | None, Field(ge=-LARGEST, le=LARGEST)]


class TriedWeights(RequestModel):
    """Weights that are tried; unset = that of the decision."""

    priority: Weight = None
    locality: Weight = None
    capacity: Weight = None
    success: Weight = None


class ScoresRequest(RequestModel):
    """What is tried on the candidates of a sampled decision."""

    decision: int | None = Field(default=None, ge=1, le=2**63 - 1, description="its id; unset = the newest")
    weights: TriedWeights = Field(default_factory=TriedWeights)
    capacity_term: CapacityTerm | None = Field(default=None, description="unset = that of the decision")
    load_power: float | None = Field(default=None, ge=0, le=10, description="unset = that of the decision")


class Terms(BaseModel):
    """The weighted terms of a score and their sum."""

    total: float
    priority: float
    capacity: float
    locality: float
    success: float


class Scored(BaseModel):
    """A candidate as the strategy saw it, with its score by the weights of the decision and by those that are tried."""

    bot: str
    priority: int
    free_units: int
    capacity: int
    hit: bool = Field(description="it had lately worked on the job's locality hint")
    success_rate: float | None = Field(description="0 to 1; unset = not read, and then it counts as 1")
    in_force: Terms
    tried: Terms


class Scores(BaseModel):
    """A sampled decision made again. The candidates with the highest tried scores come first."""

    decision: Decision
    by_weights: bool = Field(description="false: the strategy does not compare bots by these scores")
    in_force: Weights
    tried: Weights
    capacity_term: CapacityTerm = Field(description="as tried")
    load_power: float = Field(description="as tried")
    chosen: str | None = Field(
        description="the bot that the strategy would choose as tried; unset = it needs more than a sample has"
    )
    candidates: list[Scored]


router = APIRouter(prefix="/v1", tags=["operators"])


@router.get("/settings", responses=problems(), openapi_extra=OPERATORS)
async def list_settings(request: Request) -> SettingsList:
    """List the settings that live assigner and gateway processes use, with their file and since when."""
    found = await request.app.state.run(lambda connection: processes.settings_in_force(connection, limit=MAX_SETTINGS))
    shown = [
        SettingsInForce(
            kind=each.kind,
            processes=each.processes,
            file=each.config_file,
            error=each.config_error,
            changed_at=each.settings_at,
            settings=each.settings,
        )
        for each in found
    ]
    return SettingsList(settings=shown)


@router.get("/decisions", responses=problems(), openapi_extra=OPERATORS)
async def list_decisions(
    request: Request,
    before: Annotated[int | None, Query(ge=1, le=2**63 - 1, description="id of a decision: only earlier ones")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = 20,
) -> DecisionList:
    """List sampled decisions, newest first. Each assigner process samples one in ten seconds and keeps the last 20."""
    found = await request.app.state.read(lambda connection: processes.decisions(connection, before=before, limit=limit))
    return DecisionList(decisions=[_shown(row) for row in found])


@router.post("/scores", responses=problems(404, 408, 413, 415), openapi_extra=OPERATORS)
async def try_scores(request: Request, body: Annotated[ScoresRequest, Read]) -> Scores:
    """Score the candidates of a sampled decision with weights that are tried. Nothing is changed by it."""

    def work(connection: Connection) -> DecisionRow:
        row = processes.decision(connection, body.decision)
        if row is None:
            which = "has been sampled yet" if body.decision is None else f"with the id {body.decision} is kept"
            raise NotFound(f"decision: none {which}")
        return row

    return _tried(await request.app.state.run(work), body)


def _tried(row: DecisionRow, body: ScoresRequest) -> Scores:
    given = body.model_dump(include={"capacity_term", "load_power"}, exclude_none=True)
    weights = {**row.policy["weights"], **body.weights.model_dump(exclude_none=True)}
    try:
        seen, before = Seen.model_validate(row.seen), StrategySettings.model_validate(row.policy)
        tried = StrategySettings.model_validate({**row.policy, **given, "weights": weights})
    except ValidationError as error:
        raise BadInput("decision", f"this gateway cannot make it again: {first_error(error)[1]}") from None
    in_force, again = rescore(seen, before), rescore(seen, tried)
    return Scores(
        decision=_shown(row),
        by_weights=before.chooser[1] in BY_WEIGHTS,
        in_force=before.weights,
        tried=tried.weights,
        capacity_term=tried.capacity_term,
        load_power=tried.load_power,
        chosen=again.chosen,
        candidates=_scored(seen, in_force, again),
    )


def _scored(seen: Seen, in_force: Rescored, tried: Rescored) -> list[Scored]:
    found = [
        Scored(
            bot=each.bot,
            priority=each.priority,
            free_units=each.free_units,
            capacity=each.capacity,
            hit=each.hit,
            success_rate=each.rate,
            in_force=_terms(before),
            tried=_terms(after),
        )
        for each, before, after in zip(seen.candidates, in_force.scores, tried.scores, strict=True)
    ]
    return sorted(found, key=lambda each: -each.tried.total)


def _terms(score: Score) -> Terms:
    return Terms.model_validate({"success": 0.0, **score.as_decision()})


def _shown(row: DecisionRow) -> Decision:
    return Decision(
        id=row.id,
        at=row.at,
        assigner=row.assigner,
        job=row.job,
        bot=row.bot,
        strategy=row.policy["kind"],
        candidates=row.seen["of"],
    )
