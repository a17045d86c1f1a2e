"""The strategy `fragmentation`: the bot on which the job makes least unusable for the jobs that wait.

After Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent",
USENIX ATC 2023. There a fragment is what a randomly chosen task of the workload cannot use of a node's free GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from assigner.placement.room import Demand, Room, WaitingDemand, after
from assigner.placement.strategies.pack import Judge, Scale, Score, choose_least
from assigner.placement.strategy import Group, Input, Policy, Snapshot
from schema.moves.grant import Placement


@dataclass(frozen=True)
class Growth:
    """By how much a placement makes unusable more: thousandths of GPUs, then units; then what it leaves over."""

    gpu_milli: float
    units: float
    left_over: float

    @property
    def key(self) -> tuple[float, ...]:
        # What is added up in another order may differ in the last digits.
        return (round(self.gpu_milli, 6), round(self.units, 6), self.left_over)

    def as_decision(self) -> dict[str, Any]:
        return {
            "unusable_gpu_milli": round(self.gpu_milli, 3),
            "unusable_units": round(self.units, 3),
            "left_over": round(self.left_over, 6),
        }


class Fragmentation:
    """Places job after job where the part that waiting jobs cannot use grows least, on a working copy.

    What counts first is GPUs, then units; equals go to the tightest fit, as `pack` has it. The waiting jobs are
    those that were read, of the job's cohort; if none were read, those of the batch. Cost: that of `pack`, and for each
    room that has not been seen before one look at each different demand.
    """

    inputs = frozenset({Input.RESOURCES, Input.WAITING})

    def choose(self, snapshot: Snapshot, policy: Policy, *, how: Mapping[str, object]) -> list[Placement]:  # noqa: ARG002
        scale = Scale(snapshot)
        waiting = {
            cohort: snapshot.waiting.get(cohort) or _of_batch(snapshot, cohort)
            for cohort in {group.cohort for group in snapshot.groups}
        }

        def judge_of(group: Group) -> Judge:
            of_cohort = waiting[group.cohort]

            def judge(room: Room, demand: Demand) -> Score:
                before, then = of_cohort.unusable(room), of_cohort.unusable(after(room, demand))
                return Growth(then[0] - before[0], then[1] - before[1], scale.left_over(room, demand))

            return judge

        return choose_least(snapshot, judge_of, how=how)


def _of_batch(snapshot: Snapshot, cohort: int) -> WaitingDemand:
    jobs: dict[Demand, int] = {}
    for group in snapshot.groups:
        if group.cohort == cohort:
            demand = snapshot.demand(group.jobs[0])
            jobs[demand] = jobs.get(demand, 0) + len(group.jobs)
    return WaitingDemand(jobs)
