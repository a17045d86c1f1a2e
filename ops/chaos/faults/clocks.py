"""Faults of clocks, by libfaketime: the wall clock of one process, or of PostgreSQL, is set forward or back.

The monotonic clock is left alone, as it is when an operator or NTP sets the time.
"""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from ops.chaos.faults.fault import Fault
from ops.chaos.members import Role
from ops.chaos.pool import ChaosPool
from schema import clock

#: Where distributions put the library.
PLACES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")
#: Seconds for which a process runs before its clock is set, and within which the library looks at the file again.
BEFORE, CACHE = 2.0, 1


def library() -> Path | None:
    """Return the library, or None if it is not installed."""
    found = [path for place in PLACES for path in sorted(Path("/").glob(place[1:]))]
    return found[0] if found else None


class ClockStep(Fault):
    """Sets a clock by some seconds, which `most` bounds."""

    holds = (1.5, 3.0)
    most: ClassVar[float]

    @classmethod
    def missing(cls, _pool: ChaosPool) -> str | None:
        return None if library() is not None else "libfaketime is not installed"

    def environment(self) -> dict[str, str]:
        """Return the variables of a process whose clock follows a file, which says that it is right."""
        self._file = self.pool.directory / "clock"
        self._file.write_text("+0\n")
        self._file.chmod(0o644)
        return {
            "LD_PRELOAD": str(library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": str(CACHE),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def step(self) -> None:
        """Set the clock."""
        clock.sleep(BEFORE)
        seconds = self.chance.choice((-1, 1)) * self.chance.uniform(1.0, self.most)
        self._file.write_text(f"{seconds:+.1f}\n")
        self.target = f"{self.target} {seconds:+.1f} s".strip()
        clock.sleep(CACHE)


class MemberClockStep(ClockStep):
    """Sets the clock of one member by up to a day."""

    name = "step-clock"
    most = 86400.0

    def inject(self) -> None:
        self.member = self.a(self.chance.choice(list(Role)))
        self.normal = self.member.birth
        self.member.birth = replace(self.normal, extra=self.environment())
        self.member.kill()
        self.step()

    def heal(self) -> None:
        self.member.birth = self.normal
        self.member.kill()


class ServerClockStep(ClockStep):
    """Sets the clock of PostgreSQL, by which sessions expire, by more than a session lives; and back at the end."""

    name = "step-server-clock"
    most = 20.0

    def inject(self) -> None:
        self._restart(self.environment())
        self.step()

    def heal(self) -> None:
        self._restart({})

    def _restart(self, extra: dict[str, str]) -> None:
        self.pool.server.extra = extra
        self.pool.server.kill()
        self.pool.server.ensure()


CLOCKS = (MemberClockStep, ServerClockStep)
