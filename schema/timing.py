"""The times that server and bots agree on, in one model because they constrain each other."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: Seconds that a bot gives a job between SIGTERM and SIGKILL, if it has told nothing else.
KILL_GRACE = 2.0
#: Seconds after SIGKILL within which a supervisor must report the end of its command, or else is killed too.
#: Also the seconds within which the processes of a lost supervisor must die. What the kernel does not let die, as while
#: a disk does not answer, is left then, and the job is reported as over. Where the machine has time, a process dies
#: within milliseconds; where it is too busy for the supervisor, the bot kills the processes itself.
STUCK_AFTER = 2.0
#: Seconds that a bot gets beyond its grace, and beyond the period of its calls, to report the end of a job that it was
#: asked to stop: for both of its last steps, and for its call. Then the server closes its session: it refuses the bot's
#: next call, and everything that runs there ends.
KILL_ALLOWANCE = 2 * STUCK_AFTER + 2.0
#: Seconds without a sign of life after which an assigner process counts as dead.
DEAD_AFTER = 60.0


class Timing(BaseModel):
    """Times in seconds, with defaults for production. Every process of a pool must have the same values.

    sync: after how long a bot that runs jobs calls again without news, at most a sixth of `ttl`. The gateway holds its
        calls meanwhile, so that news reaches it at once. Doubling it and `ttl` halves the calls of such bots.
    ttl: how long a session lives without a call. Doubling it lets bots survive longer outages and doubles
        the time until a lost bot's jobs run elsewhere.
    reap: how often upkeep looks for expired sessions and overdue leases.
    ack: how long a granted lease may stay unacknowledged before it is taken back.
    poll: how often a gateway reads the news for its long polls when no wake-up arrives; up to four times as rarely if
        that takes long. Doubling it halves the idle load and doubles the wait of a bot whose wake-up was lost.
        Assigners have an interval of their own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sync: float = Field(default=5.0, gt=0, le=3600)
    ttl: float = Field(default=30.0, gt=0, le=86400)
    reap: float = Field(default=2.0, gt=0, le=3600)
    ack: float = Field(default=15.0, gt=0, le=3600)
    poll: float = Field(default=1.0, gt=0, le=60)

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.ttl <= 2 * self.sync:
            raise ValueError(f"ttl ({self.ttl}) must be more than twice sync ({self.sync})")
        if self.reap >= self.ttl:
            raise ValueError(f"reap ({self.reap}) must be less than ttl ({self.ttl})")
        return self

    @property
    def detect(self) -> float:
        """Longest time in seconds until the jobs of a lost bot are queued again (T_detect).

        It is counted from the bot's last call, or from the end of a call that was held for the bot.
        """
        return self.ttl + self.reap + 2.0
