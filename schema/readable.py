"""Durations, times and numbers as people read them. Programs get seconds and ISO 8601 in UTC, with `--json`."""

import sys
from datetime import UTC, datetime

#: The units of durations of a minute and more, the largest first: seconds in one, and the abbreviation.
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return a duration in at most two units: `<1 ms`, `40 ms`, `1.5 s`, `2 min 5 s`, `3 h`, `4 d 6 h`."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 0.9995:
        return "0 s" if seconds == 0 else "<1 ms" if seconds < 0.001 else f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    size, unit = next(each for each in _UNITS if whole >= each[0])
    smaller, smaller_unit = _UNITS[_UNITS.index((size, unit)) + 1]
    whole = round(whole / smaller) * smaller
    if (size, unit) != _UNITS[0] and whole >= (larger := _UNITS[_UNITS.index((size, unit)) - 1])[0]:
        return f"1 {larger[1]}"  # rounded up to one of the next unit
    rest = whole % size // smaller
    return f"{whole // size:,} {unit}" + (f" {rest} {smaller_unit}" if rest else "")


def moment(time: str | datetime, *, local: bool | None = None) -> str:
    """Return a time: on a terminal with its zone, as `2026-03-01 13:00:00.250 CET`, otherwise in ISO 8601, in UTC.

    time: with a zone, as ISO 8601 or as an object. local: the zone of this machine instead of UTC; None = if standard
    output is a terminal.
    """
    at = datetime.fromisoformat(time) if isinstance(time, str) else time
    if not (sys.stdout.isatty() if local is None else local):
        return at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    here = at.astimezone()
    parts = f".{here.microsecond // 1000:03}" if here.microsecond else ""
    return f"{here:%Y-%m-%d %H:%M:%S}{parts} {here:%Z}"


def number(value: float, *, digits: int = 6) -> str:
    """Return a number with so many significant digits, without an exponent unless it is far too small or large."""
    text = f"{value:.{digits}g}"
    if "e" not in text or not 1e-9 <= abs(value) < 1e15:
        return text
    return f"{value:.12f}".rstrip("0").rstrip(".")
