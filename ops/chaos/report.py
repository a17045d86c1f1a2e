"""What a run has found: one row for each fault, and every violation with the fault that it followed."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from leasehold.errors import BadInput

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
    killed: how many processes the fault has sent SIGKILL.
    """

    fault: str
    target: str
    began: float
    healed: float
    finished: float | None
    submitted: float | None
    killed: int = 0

    @property
    def recovery(self) -> float | None:
        """Seconds until both had happened again."""
        return None if self.finished is None or self.submitted is None else max(self.finished, self.submitted)


@dataclass
class Report:
    """A whole run. `counts`: jobs, submits and the like; `not_injected`: faults that cannot be made here, and why.

    missed: how often a fault has found nothing to hit, by its name; these are no injections.
    """

    seed: int
    seconds: float = 0.0
    injections: list[Injection] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    not_injected: dict[str, str] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    directory: str = ""

    def fault_of(self, violation: Violation) -> str:
        """Return the fault that was injected last before the violation."""
        before = [each for each in self.injections if violation.at is not None and each.began <= violation.at]
        return before[-1].fault if before else NOBODY

    def json(self) -> dict[str, Any]:
        """Return everything as one JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Report":
        """Return the report that `json` has told. Raises BadInput unless it is one."""
        try:
            injections = [Injection(**each) for each in told["injections"]]
            violations = [Violation(**{**each, "kind": Kind(each["kind"])}) for each in told["violations"]]
            return cls(**{**told, "injections": injections, "violations": violations})
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput("report", f"is no report of a fault run: {error!r}") from None


def table(reports: Sequence[Report]) -> str:
    """Return one table of runs as text: fault, times, violations by kind, recovery in seconds."""
    heads = ["fault", "times", *COLUMNS, "p50 s", "worst s"]
    blamed: dict[str, Counter[Kind]] = {}
    waits: dict[str, list[float]] = {}
    times: Counter[str] = Counter()
    for report in reports:
        for violation in report.violations:
            blamed.setdefault(report.fault_of(violation), Counter())[violation.kind] += 1
        for each in report.injections:
            times[each.fault] += 1
            if each.recovery is not None:
                waits.setdefault(each.fault, []).append(each.recovery)
    names = [*sorted(times), *([NOBODY] if NOBODY in blamed else [])]
    rows = [_row(name, times[name], blamed.get(name, Counter()), waits.get(name, [])) for name in names]
    rows.append(_row("all", times.total(), sum(blamed.values(), Counter()), list(chain(*waits.values()))))
    widths = [max(len(line[place]) for line in [heads, *rows]) for place in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in [heads, *rows]
    )


def _row(name: str, times: int, found: Counter[Kind], waits: Sequence[float]) -> list[str]:
    shown = ["-", "-"] if not waits else [f"{statistics.median(waits):.2f}", f"{max(waits):.2f}"]
    return [name, str(times), *(str(found[kind]) for kind in COLUMNS.values()), *shown]
