"""Restarts, as an operator makes them: polite ones, into another version, and around an upgrade of the database."""

from ops.chaos.faults.fault import Fault
from ops.chaos.members import ROOT, Role
from ops.chaos.pool import ChaosPool


class PoliteRestart(Fault):
    """Restarts a member with SIGTERM."""

    name = "restart"

    def inject(self) -> None:
        member = self.a(self.chance.choice(list(Role)))
        member.restart(member.birth)


class OtherVersion(Fault):
    """Restarts a member in the other version, this one or the one before. So the pool is a mixture of both."""

    name = "restart-in-other-version"

    @classmethod
    def missing(cls, pool: ChaosPool) -> str | None:
        return None if pool.before is not None else pool.why_no_version

    def inject(self) -> None:
        assert self.pool.before is not None
        member = self.a(self.chance.choice(list(Role)))
        older = member.birth.tree == ROOT
        self.target += f" -> {self.pool.before.name}" if older else " -> this version"
        self.pool.put(member.name, older=older)


class Upgrade(Fault):
    """Upgrades the database as the documents say: without gateways and assigners, while commands run on."""

    name = "upgrade"

    def inject(self) -> None:
        with self.pool.keeper.away([*self.pool.of(Role.GATEWAY), *self.pool.of(Role.ASSIGNER)]):
            self.pool.upgrade(ROOT)


VERSIONS = (PoliteRestart, OtherVersion, Upgrade)
