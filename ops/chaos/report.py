"""What a run has found: one row for each fault, and every violation with the fault that it followed."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ops.chaos.checker import Kind, Violation

#: The columns of the table, in their order, and the kinds of violations that they count.
COLUMNS = {
    "lost": Kind.LOST,
    "failed": Kind.FAILED,
    "doubled": Kind.DOUBLED,
    "overlaps": Kind.OVERLAP,
    "fences": Kind.FENCE,
    "survivors": Kind.SURVIVOR,
    "invariants": Kind.INVARIANT,
    "stuck": Kind.STUCK,
}
#: The row of what no fault precedes, or nobody can date.
NOBODY = "(unknown)"


@dataclass(frozen=True)
class Injection:
    """One fault that was injected. `began` and `healed` are on the monotonic clock.

    finished, submitted: seconds from the healing to the next stored result and to the next acknowledged submit; None
        if there was none.
    """

    fault: str
    target: str
    began: float
    healed: float
    finished: float | None
    submitted: float | None

    @property
    def recovery(self) -> float | None:
        """Seconds until both had happened again."""
        return None if self.finished is None or self.submitted is None else max(self.finished, self.submitted)


@dataclass
class Report:
    """A whole run. `counts`: jobs, submits and the like; `not_injected`: faults that cannot be made here, and why."""

    seed: int
    seconds: float = 0.0
    injections: list[Injection] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    not_injected: dict[str, str] = field(default_factory=dict)
    directory: str = ""

    def fault_of(self, violation: Violation) -> str:
        """Return the fault that was injected last before the violation."""
        before = [each for each in self.injections if violation.at is not None and each.began <= violation.at]
        return before[-1].fault if before else NOBODY

    def table(self) -> str:
        """Return the table as text: fault, times, violations by kind, recovery in seconds."""
        heads = ["fault", "times", *COLUMNS, "p50 s", "worst s"]
        blamed: dict[str, Counter[Kind]] = {}
        for violation in self.violations:
            blamed.setdefault(self.fault_of(violation), Counter())[violation.kind] += 1
        times = Counter(each.fault for each in self.injections)
        names = [*sorted(times), *([NOBODY] if NOBODY in blamed else [])]
        rows = [self._row(name, times[name], blamed.get(name, Counter())) for name in names]
        total: Counter[Kind] = sum(blamed.values(), Counter())
        rows.append(self._row("all", len(self.injections), total, every=True))
        widths = [max(len(line[place]) for line in [heads, *rows]) for place in range(len(heads))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in [heads, *rows]
        )

    def json(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        return asdict(self)

    def _row(self, name: str, times: int, found: Counter[Kind], *, every: bool = False) -> list[str]:
        waits = recoveries(each for each in self.injections if every or each.fault == name)
        shown = ["-", "-"] if not waits else [f"{statistics.median(waits):.2f}", f"{max(waits):.2f}"]
        return [name, str(times), *(str(found[kind]) for kind in COLUMNS.values()), *shown]


def recoveries(injections: Sequence[Injection] | Any) -> list[float]:
    """Return the recoveries in seconds of those that had one."""
    return [each.recovery for each in injections if each.recovery is not None]
