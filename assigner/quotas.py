"""What operators tune about quotas and preemption. The quotas themselves are in the database."""

from pydantic import BaseModel, ConfigDict, Field

from schema.ledger import EVICTION_COOLDOWN

DAY = 86400.0


class QuotaSettings(BaseModel):
    """Preemption on behalf of minimum quotas. Times are seconds; names and defaults are BuildGrid's where it has them.

    preemption: reclaim units for instances below their minimum at all.
    preemption_delay: how long a job of such an instance waits for a free bot first. Doubling it halves the evictions
        that a short wait would have spared and doubles the time until a minimum is met.
    eviction_cooldown: each eviction takes one off the maximum of the evicted instance for so long. Doubling
        it makes instances that were evicted come back half as fast; 0 lets them come back at once.
    max_evictions: a job evicted so often is exempt. Doubling it lets one job lose twice as much work.
    min_run_time: a job that has run for less is left alone. Doubling it protects short jobs.
    reservation: how long what an eviction frees is kept for the job that it was for, on top of the time the bot has to
        stop. Doubling it leaves a bot idle twice as long when the job has gone meanwhile.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preemption: bool = True
    preemption_delay: float = Field(default=20.0, ge=0, le=DAY)
    eviction_cooldown: float = Field(default=EVICTION_COOLDOWN, ge=0, le=DAY)
    max_evictions: int = Field(default=5, ge=0, le=1000)
    min_run_time: float = Field(default=0.0, ge=0, le=DAY)
    reservation: float = Field(default=10.0, gt=0, le=3600)
