"""Proactive fetching: a bot that has just finished something is given more in the same call."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from schema import fetching, moves
from schema.fetching import Fetcher
from schema.moves import Granted, Placement, RetryPace

STRATEGY = "proactive"


class FetchSettings(BaseModel):
    """What a bot's sync does beside settling its leases; names and defaults are BuildGrid's where it has them.

    enabled: give bots work at a sync at all; without it only assigners place jobs.
    to_capacity: false gives at most as many jobs as were just completed, and only new ones and those still
        in backoff (jobs whose backoff has run out are left to the assigners); true fills all spare
        capacity at every sync, whatever the backoff.
    backoff: `considered` knows new jobs by a column; `literal` compares times alone, by which a job is never
        new, as its time is past when somebody looks.
    bot_locality_hint_limit: the most recent locality hints that are kept for each bot; 0 keeps none. Doubling it
        makes more locality hits, of which more are stale.
    retry_base: seconds a job waits after its first attempt that failed or could not start, doubled with each further
        one. Doubling it doubles every wait below `retry_cap`.
    retry_cap: the longest such wait, seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    enabled: bool = True
    to_capacity: bool = False
    backoff: Literal["considered", "literal"] = "considered"
    bot_locality_hint_limit: int = Field(default=10, ge=0, le=1000)
    retry_base: float = Field(default=1.0, ge=0, le=86400)
    retry_cap: float = Field(default=60.0, ge=0, le=86400)

    def model_post_init(self, _context: object) -> None:
        """Refuse what no single field can show to be wrong."""
        if self.retry_cap < self.retry_base:
            raise ValueError("retry_cap must not be less than retry_base")

    @property
    def pace(self) -> RetryPace:
        """How long retries wait."""
        return RetryPace(base=self.retry_base, cap=self.retry_cap)

    def limit(self, *, completed: int, room: int) -> int:
        """How many jobs may be fetched, given how many this sync completed and the free units."""
        if not self.enabled:
            return 0
        return room if self.to_capacity else min(completed, room)


def fetch(
    connection: Connection,
    settings: FetchSettings,
    *,
    bot: Fetcher,
    completed: int,
    ack: float,
    cooldown: float,
) -> list[Granted]:
    """Grant the bot the most urgent jobs that it may have. The caller holds the bot's row, and it is free."""
    limit = settings.limit(completed=completed, room=bot.room)
    if limit <= 0:
        return []
    jobs = fetching.pick_for_bot(
        connection,
        bot,
        limit=limit,
        any_wait=settings.to_capacity,
        literal=settings.backoff == "literal",
        cooldown=cooldown,
    )
    placements = [Placement(job.id, bot.id, {"bot": bot.name, "strategy": STRATEGY}) for job in jobs]
    return moves.grant(
        connection,
        placements,
        assigner=f"bot:{bot.name}",
        strategy=STRATEGY,
        ack=ack,
        tell=False,
        again=True,
        cooldown=cooldown,
    )
