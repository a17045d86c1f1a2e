"""What a submit would do, without doing it: `submit --plan`.

The submit is made by the code of every submit, and its jobs are explained by the code of `explain`, in a savepoint that
is rolled back: rows, notifications and audit are gone with it. Its locks are held meanwhile, as those of a submit. What
it drew from sequences of the database stays drawn, as after a submit that was refused; no caller sees these numbers.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from leasehold.states import JobState
from pydantic import BaseModel, Field

from assigner.admission.rules import RULES, Rules
from assigner.cycle.settings import AssignerSettings
from assigner.explain.answer import Explained, Explanation, explain, placement_sentence
from assigner.placement import resources
from assigner.placement import sampling as samples
from assigner.placement.fleet import Fleet
from assigner.placement.strategy import Snapshot
from assigner.preemption.plan import QuotaSettings
from schema.moves.grant import PREEMPTION
from schema.moves.submit import Submitted
from schema.picking import constrained, ready
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: The most jobs of one plan: each is explained on its own.
MAX_PLANNED = 100

# The newest move of this transaction on the job that a submit has not made.
MOVE = Statement("""
SELECT j.public_id::text AS public_id, (SELECT e.move FROM stored_events e
    WHERE e.job_id = j.id AND e.at >= now() AND e.move IN ('join', 'replace') ORDER BY e.id DESC LIMIT 1) AS move
FROM jobs j WHERE j.id = :id
""")
BOT = Statement("SELECT name FROM bots WHERE id = :id")
SILENTLY = Statement("SELECT set_config('leasehold.wake', 'off', true)")


@dataclass(frozen=True)
class Planning:
    """How the assigners of the pool decide. sync: the bots' sync period, in seconds."""

    assigners: Sequence[AssignerSettings] = (AssignerSettings(),)
    quotas: QuotaSettings = field(default_factory=QuotaSettings)
    rules: Rules = RULES
    sync: float = 1.0


class PlannedBot(BaseModel):
    """The bot that the strategy would choose now. A bot that has just finished a job may ask for this one before."""

    name: str | None = Field(description="unset: only operators see it")
    strategy: str
    sentence: str


class PlannedJob(BaseModel):
    """What would become of one request."""

    outcome: Literal["new", "join", "replace", "known"] = Field(
        description="new: a job would be made; join, replace: the job with the dedup_key would be joined or replaced; "
        "known: the earlier job would be the answer, because of its key or because it keeps its dedup_key"
    )
    job: UUID | None = Field(description="id of the job that is there already; unset for `new`")
    explanation: Explained | None = Field(description="as `explain` tells it; unset if the job is not kept any more")
    bot: PlannedBot | None = Field(description="unset: none would take it now")


def plan(
    connection: Connection,
    submit: Callable[[Connection], Sequence[Submitted]],
    *,
    instances: Sequence[str] | None,
    planning: Planning,
    chance: random.Random,
) -> list[PlannedJob]:
    """Tell what this submit would do, in the order of its requests; nothing is stored. Raises what the submit raises.

    instances: the caller's instances; None = an operator.
    """
    with connection.savepoint() as attempt:
        connection.execute(SILENTLY)
        found = [
            _planned(connection, one, instances=instances, planning=planning, chance=chance)
            for one in submit(connection)
        ]
        attempt.rollback()
    return found


def _planned(
    connection: Connection,
    taken: Submitted,
    *,
    instances: Sequence[str] | None,
    planning: Planning,
    chance: random.Random,
) -> PlannedJob:
    everything = instances is None
    row = connection.execute(MOVE, {"id": taken.job_id}).one_or_none()
    told = (
        None
        if row is None
        else explain(
            connection,
            row.public_id,
            instances=instances,
            quotas=planning.quotas,
            sync=planning.sync,
            rules=planning.rules,
        )
    )
    bot = None
    if told is not None and told.state == JobState.QUEUED and all(gate.open is not False for gate in told.gates):
        bot = _bot(connection, taken.job_id, told, planning, everything=everything, chance=chance)
    return PlannedJob(
        outcome="new" if taken.created else (row and row.move) or "known",
        job=None if taken.created else UUID(taken.public_id if row is None else row.public_id),
        explanation=None if told is None else Explained.model_validate(told.model_dump(exclude={"id"})),
        bot=bot,
    )


def _bot(
    connection: Connection,
    job_id: int,
    told: Explanation,
    planning: Planning,
    *,
    everything: bool,
    chance: random.Random,
) -> PlannedBot | None:
    """Choose as an assigner does for this job alone."""
    serving = (one for one in planning.assigners if not one.instances or told.instance in one.instances)
    assigner = next(serving, planning.assigners[0])
    policy = assigner.strategy
    head = constrained.job(connection, job_id)
    job = ready.one(connection, job_id) if head is None else head[0].job
    if job is None:
        return None
    strategy, name = policy.chooser
    placements = samples.place_on_kept(connection, [job])
    if placements:
        name = PREEMPTION
    elif head is not None and resources.need_of(head[0].queue):
        seen: Snapshot = resources.read_resource_snapshot(
            connection, Fleet(), [head[0]], policy.sampled, chance=chance, inputs=policy.inputs
        )
    else:
        seen = samples.sample_snapshot(
            connection,
            [job],
            sample_size=policy.sampled.sample_size,
            fleet=Fleet(),
            chance=chance,
            inputs=policy.inputs,
        )
    if not placements:
        placements = seen.chosen_by(strategy, policy, how={"strategy": name, "round": 1})
    if not placements:
        return None
    (placement,) = placements
    bot = connection.execute(BOT, {"id": placement.bot_id}).scalar_one()
    shown: str | None = bot if everything else None
    sentence = placement_sentence({"bot": shown, "strategy": name, "decision": placement.decision})
    return PlannedBot(name=shown, strategy=name, sentence=sentence)
