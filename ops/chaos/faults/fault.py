"""The interface of faults. Each kind is a class with a name; each object is one fault that happens to one pool once."""

import random
from abc import ABC, abstractmethod
from typing import ClassVar

from ops.chaos.members import BotParts, Member, Role
from ops.chaos.pool import ChaosPool
from schema import clock

#: Seconds within which some bot must run a command, and between two looks.
BUSY_WITHIN, LOOK = 30.0, 0.05


class NothingToHit(Exception):
    """The pool runs nothing that this fault could hit now, so that the fault does not happen."""


class Fault(ABC):
    """One fault: it is injected, holds for a while and is healed. All chance comes from `chance`.

    name: how reports and `--only` call it.
    holds: the least and the most seconds between injection and healing; both 0 for a fault that is over at once.
    """

    name: ClassVar[str]
    holds: ClassVar[tuple[float, float]] = (0.0, 0.0)

    def __init__(self, pool: ChaosPool, chance: random.Random) -> None:
        self.pool, self.chance = pool, chance
        #: What was hit, for the log of the run.
        self.target = ""
        #: How many processes were sent SIGKILL.
        self.killed = 0

    @classmethod
    def missing(cls, _pool: ChaosPool) -> str | None:
        """Say why this fault cannot be injected into this pool on this machine; None if it can."""
        return None

    @abstractmethod
    def inject(self) -> None:
        """Let the fault begin. Raises NothingToHit."""

    def heal(self) -> None:  # noqa: B027 — most kills have nothing to heal
        """End the fault. Called once after `inject`, also if that failed halfway."""

    def a(self, role: Role) -> Member:
        """Choose a member with this role as the target."""
        member = self.chance.choice(self.pool.of(role))
        self.target = member.name
        return member

    def a_busy_bot(self) -> tuple[Member, BotParts]:
        """Choose a bot that runs a command; return its processes too. Raises NothingToHit if none does for long.

        A bot that was hit before may still be starting, and what hits it then shows nothing.
        """
        bots = self.pool.of(Role.BOT)
        bots = self.chance.sample(bots, len(bots))
        deadline = clock.monotonic() + BUSY_WITHIN
        while clock.monotonic() < deadline:
            for bot in bots:
                parts = bot.parts()
                if parts.commands:
                    self.target = bot.name
                    return bot, parts
            clock.sleep(LOOK)
        raise NothingToHit(f"no bot has run a command for {BUSY_WITHIN:.0f} s")
