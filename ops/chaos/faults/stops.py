"""Faults that stop processes with SIGSTOP, as a paused virtual machine or a machine out of memory does."""

import signal
from collections.abc import Sequence
from typing import ClassVar

from ops.chaos.faults.fault import Fault
from ops.chaos.faults.kills import backends, send
from ops.chaos.members import BotParts, Role


class Stop(Fault):
    """Stops what `victims` names, and lets it go on when it heals. Some stops are longer than a session lives."""

    holds = (0.3, 2.0)

    stopped: Sequence[int] = ()

    def inject(self) -> None:
        self.stopped = self.victims()
        send(self.stopped, signal.SIGSTOP)

    def heal(self) -> None:
        send(self.stopped, signal.SIGCONT)

    def victims(self) -> list[int]:
        raise NotImplementedError


class MemberStop(Stop):
    """Stops one member, and nothing below it."""

    role: ClassVar[Role]

    def victims(self) -> list[int]:
        return [self.a(self.role).pid]


class GatewayStop(MemberStop):
    name = "stop-gateway"
    role = Role.GATEWAY


class AssignerStop(MemberStop):
    name = "stop-assigner"
    role = Role.ASSIGNER


class AgentStop(MemberStop):
    name = "stop-agent"
    role = Role.BOT

    def victims(self) -> list[int]:
        return [self.a_busy_bot()[0].pid]


class LongAgentStop(AgentStop):
    """Stops an agent until its session has expired and its jobs run elsewhere."""

    name = "stop-agent-past-session"
    holds = (7.0, 8.0)


class BelowAgentStop(Stop):
    """Stops one of the processes below a bot that runs a command."""

    def victims(self) -> list[int]:
        _, parts = self.a_busy_bot()
        return [self.chance.choice(self.below(parts))]

    def below(self, parts: BotParts) -> list[int]:
        raise NotImplementedError


class GuardianStop(BelowAgentStop):
    name = "stop-guardian"

    def below(self, parts: BotParts) -> list[int]:
        return parts.guardians


class SupervisorStop(BelowAgentStop):
    name = "stop-supervisor"

    def below(self, parts: BotParts) -> list[int]:
        return parts.supervisors


class CommandStop(BelowAgentStop):
    name = "stop-command"

    def below(self, parts: BotParts) -> list[int]:
        return parts.commands


class ServerStop(Stop):
    """Stops every process of PostgreSQL."""

    name = "stop-postgres"

    def victims(self) -> list[int]:
        return self.pool.server.processes()


class BackendStop(Stop):
    """Stops one backend, perhaps in the middle of a transaction that holds locks."""

    name = "stop-backend"
    holds = (0.3, 1.5)

    def victims(self) -> list[int]:
        found = backends(self)
        return [self.chance.choice(found)] if found else []


STOPS = (
    GatewayStop,
    AssignerStop,
    AgentStop,
    LongAgentStop,
    GuardianStop,
    SupervisorStop,
    CommandStop,
    ServerStop,
    BackendStop,
)
