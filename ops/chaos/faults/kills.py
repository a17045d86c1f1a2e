"""Faults that kill with SIGKILL: members, processes below bots, the server and its backends."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

import psycopg

from bots.agent.guardian import process_tree
from ops.chaos import execution
from ops.chaos.faults.fault import Fault, NothingToHit
from ops.chaos.members import BotParts, Member, Role


def send(processes: Sequence[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def backends(fault: Fault) -> list[int]:
    """Return the server's processes that serve our members."""
    with fault.pool.server.connect() as connection:
        rows = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend' AND application_name NOT LIKE 'chaos%' AND application_name <> ''"
        ).fetchall()
    return [pid for (pid,) in rows]


class MemberKill(Fault):
    """Kills one member. It is started again at once."""

    role: ClassVar[Role]

    def inject(self) -> None:
        self.choose().kill()
        self.killed = 1

    def choose(self) -> Member:
        return self.a(self.role)


class GatewayKill(MemberKill):
    name = "kill-gateway"
    role = Role.GATEWAY


class AssignerKill(MemberKill):
    name = "kill-assigner"
    role = Role.ASSIGNER


class AgentKill(MemberKill):
    name = "kill-agent"
    role = Role.BOT

    def choose(self) -> Member:
        return self.a_busy_bot()[0]


class AllAgentsKill(Fault):
    """Kills every agent at the same moment."""

    name = "kill-all-agents"

    def inject(self) -> None:
        for member in self.pool.of(Role.BOT):
            member.signal(signal.SIGKILL)
            self.killed += 1


class BelowAgentKill(Fault):
    """Kills one of the processes of a bot that `below` names, or all of them. The bot runs a command."""

    every: ClassVar[bool] = False

    def inject(self) -> None:
        found = self.below(*self.a_busy_bot())
        hit = found if self.every else [self.chance.choice(found)]
        send(hit, signal.SIGKILL)
        self.killed = len(hit)

    def below(self, bot: Member, parts: BotParts) -> list[int]:
        raise NotImplementedError


class GuardianKill(BelowAgentKill):
    name = "kill-guardian"

    def below(self, _bot: Member, parts: BotParts) -> list[int]:
        return parts.guardians


class SupervisorKill(BelowAgentKill):
    name = "kill-supervisor"

    def below(self, _bot: Member, parts: BotParts) -> list[int]:
        return parts.supervisors


class CommandKill(BelowAgentKill):
    """Kills one command. Its job fails then, which the journal has to allow."""

    name = "kill-command"

    def below(self, _bot: Member, parts: BotParts) -> list[int]:
        running = [each for each in execution.processes(self.pool.run) if each.pid in parts.commands]
        if not running:
            raise NothingToHit(f"{self.target} has just ended its commands")
        victim = self.chance.choice(running)
        self.pool.journal.kill(victim.job)
        return [victim.pid]


class AgentAndGuardianKill(BelowAgentKill):
    """Kills an agent and its guardian at the same moment; only the supervisors are left to end the commands."""

    name = "kill-agent-and-guardian"
    every = True

    def below(self, bot: Member, parts: BotParts) -> list[int]:
        bot.expect_end()
        return [bot.pid, *parts.guardians]


class GuardianAndSupervisorsKill(BelowAgentKill):
    """Kills everything between an agent and its commands; the kernel and the agent are left to end these."""

    name = "kill-guardian-and-supervisors"
    every = True

    def below(self, _bot: Member, parts: BotParts) -> list[int]:
        return [*parts.guardians, *parts.supervisors]


class BotKill(Fault):
    """Kills all of a bot but its commands, which only the kernel can end then, until its jobs run elsewhere.

    What hides from its command is left to the next agent, however late that comes. So it is killed here.
    """

    name = "kill-bot"
    holds = (7.0, 8.0)

    def inject(self) -> None:
        bot, parts = self.a_busy_bot()
        self.pool.keeper.keep_away([bot])
        bot.expect_end()
        hit = [bot.pid, *parts.guardians, *parts.supervisors]
        send(hit, signal.SIGKILL)
        self.killed = len(hit)
        running = [each for each in execution.processes(self.pool.run) if each.bot == bot.name]
        send(execution.hidden(running, execution.read(self.pool.execution_log)), signal.SIGKILL)

    def heal(self) -> None:
        self.pool.keeper.call_back()


class ServerKill(Fault):
    """Kills the postmaster. The server is started again at once and recovers."""

    name = "kill-postgres"

    def inject(self) -> None:
        self.pool.server.kill()
        self.killed = 1
        self.pool.server.ensure()


class BackendKill(Fault):
    """Kills one backend, upon which PostgreSQL ends all others and recovers by itself."""

    name = "kill-backend"

    def inject(self) -> None:
        send([self.chance.choice(process_tree().get(self.pool.server.pid, []))], signal.SIGKILL)
        self.killed = 1


class BackendTermination(Fault):
    """Ends some connections of members as an administrator would."""

    name = "terminate-backends"

    def inject(self) -> None:
        found = backends(self)
        with suppress(psycopg.OperationalError), self.pool.server.connect() as connection:
            for pid in self.chance.sample(found, min(len(found), self.chance.randint(1, 10))):
                connection.execute("SELECT pg_terminate_backend(%s)", [pid])


KILLS = (
    GatewayKill,
    AssignerKill,
    AgentKill,
    AllAgentsKill,
    GuardianKill,
    SupervisorKill,
    CommandKill,
    AgentAndGuardianKill,
    GuardianAndSupervisorsKill,
    BotKill,
    ServerKill,
    BackendKill,
    BackendTermination,
)
