"""What a check says."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from schema.limits import escaped

#: Characters of a name from the server that are shown.
SHOWN = 80


class Verdict(StrEnum):
    """How a check ended, the least grave first. `unknown` is for a check that could not be made."""

    OK = "ok"
    UNKNOWN = "unknown"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Check:
    """One answer: `found` is a sentence, `remedy` what to do unless all is well, `figures` the numbers behind them,
    with their units in the names."""

    name: str
    verdict: Verdict
    found: str
    remedy: str | None = None
    figures: Mapping[str, object] = field(default_factory=dict)


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """The one that counts, ok if there is none."""
    return max(verdicts, key=list(Verdict).index, default=Verdict.OK)


def shown(name: object) -> str:
    """A name from the server as it may be printed."""
    return escaped(str(name), SHOWN)


def quoted(text: str) -> str:
    """A literal as it stands in the statements of a remedy."""
    return "'" + shown(text).replace("'", "''") + "'"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
