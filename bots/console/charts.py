"""Line charts of pool samples and simulations, drawn as SVG by the page itself: no script and no library draws them."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, tzinfo
from itertools import pairwise
from typing import Any

from bots.console.parts import node

Record = Mapping[str, Any]

#: Size of a chart in its own units, and the space for the figures at its left and below it.
WIDTH, HEIGHT, LEFT, BELOW = 480, 160, 52, 22
#: The most points of one line. More samples are merged.
MAX_POINTS = 240
#: Areas of a chart that tell its values, and the fewest seconds that a chart shows.
MAX_STRIPS, LEAST = 60, 900.0
#: Seconds of the units of a duration, the largest first.
UNITS = ((3600, "hours"), (60, "minutes"), (1, "seconds"))
#: Figures at the left, and times below.
MARKS = 4
#: Field → number of the colour of its line.
COLOURS = {
    "waiting": 0,
    "running": 1,
    "succeeded": 1,
    "failed": 2,
    "cancelled": 3,
    "dead": 4,
    "oldest_wait": 0,
    "fairness": 1,
}
#: What a chart without figures says.
NOTHING = "No figures of this time."
#: Fields of which a merged point has the number per minute; of others it has the largest value.
SUMS = ("succeeded", "failed", "cancelled", "dead")


class Chart:
    """A chart of some fields of samples, with a line for each."""

    def __init__(
        self,
        title: str,
        fields: Mapping[str, str],
        *,
        most: float | None = None,
        durations: bool = False,
        colours: Mapping[str, int] = COLOURS,
    ) -> None:
        """fields: field of a sample → its name on the page. most: the figure at the top; None = as the samples need.

        durations: the values are seconds, which are shown in the unit that fits them. colours: field → number of the
        colour of its line.
        """
        self._title, self._fields, self._most, self._durations = title, fields, most, durations
        self._colours = colours
        with node("figure", kind="chart"):
            self._caption = node("figcaption", title)
            with node("div", kind="key"):
                for field, name in fields.items():
                    node("span", f"— {name}", f"line-{colours[field]}")
            self._place = node("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)

    def show(self, samples: Sequence[Record], *, start: float, end: float, zone: tzinfo) -> None:
        """Draw samples between two times, in seconds since 1970, from the first minute that was sampled.

        Nothing is drawn where no minute was sampled, and a chart without any says so. zone: in which times are told.
        """
        start = begun(samples, start=start, end=end)
        lines = {field: points(samples, field, start=start, end=end) for field in self._fields}
        largest = max((value for line in lines.values() for _, value in line), default=0.0)
        if self._durations:
            size, unit = next(each for each in UNITS if largest >= MARKS * each[0] or each[0] == 1)
            lines = {field: [(x, value / size) for x, value in line] for field, line in lines.items()}
            largest, self._caption.text = largest / size, f"{self._title}, {unit}"
        most = self._most or scale(largest)
        self._place.clear()
        self._place.props["aria-label"] = self._told(lines)
        is_empty = not any(lines.values())
        with self._place:
            if is_empty:
                node("text", NOTHING, x=(LEFT + WIDTH) / 2, y=_y(0.5) + 4, text_anchor="middle")
            for mark in range(MARKS + 1 if not is_empty else 1):
                y = _y(mark / MARKS)
                node("line", kind="axis", x1=LEFT, x2=WIDTH, y1=y, y2=y)
                if mark % 2 == 0:
                    node("text", f"{most * mark / MARKS:,g}", x=LEFT - 4, y=y + 4, text_anchor="end")
            for mark in range(MARKS):
                told = _clock(start + (end - start) * mark / MARKS, zone, long=end - start > 172_800)
                node("text", told, x=LEFT + (WIDTH - LEFT) * mark / MARKS, y=HEIGHT - 6)
            node("text", zone_name(end, zone), x=WIDTH - 4, y=HEIGHT - 6, text_anchor="end")
            widest = max((sample["span"] for sample in samples), default=60) / (end - start)
            for field, line in lines.items():
                for part in parts(line, gap=3 * max(widest, 1 / MAX_POINTS)):
                    drawn = " ".join(f"{LEFT + x * (WIDTH - LEFT):.1f},{_y(value / most):.1f}" for x, value in part)
                    node("polyline", kind=f"line-{self._colours[field]}", points=drawn)
            self._strips(lines, start=start, end=end, zone=zone)

    def _strips(
        self, lines: Mapping[str, Sequence[tuple[float, float]]], *, start: float, end: float, zone: tzinfo
    ) -> None:
        """Put areas over the chart that tell its values to who points at them."""
        values: dict[float, list[str]] = {}
        for field, line in lines.items():
            for x, value in line:
                values.setdefault(x, []).append(f"{self._fields[field]} {value:,.3g}")
        places = sorted(values)[:: max(1, -(-len(values) // MAX_STRIPS))]
        for x, after in pairwise([*places, 1.0]):
            moment = start + (end - start) * x
            day = f"{_clock(moment, zone, long=True)} " if end - start > 86_400 else ""
            at = f"{day}{_clock(moment, zone, long=False)} {zone_name(moment, zone)}"
            width = f"{max(0.0, after - x) * (WIDTH - LEFT):.1f}"
            left = f"{LEFT + x * (WIDTH - LEFT):.1f}"
            with node("rect", kind="strip", x=left, y=6, width=width, height=HEIGHT - BELOW):
                node("title", f"{at}: {', '.join(values[x])}")

    def _told(self, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
        last = [f"{self._fields[field]} {line[-1][1]:,g}" for field, line in lines.items() if line]
        return f"{self._title}: " + (f"last {', '.join(last)}" if last else "no samples")


def begun(samples: Sequence[Record], *, start: float, end: float) -> float:
    """Return the time at which a chart begins: the first sample between the two times, at least `LEAST` seconds ago."""
    first = min((epoch(sample["at"]) - sample["span"] for sample in samples), default=start)
    return max(start, min(first, end - LEAST))


def points(samples: Sequence[Record], field: str, *, start: float, end: float) -> list[tuple[float, float]]:
    """Return the line of a field: the place in time from 0 to 1, and the value, per minute for what ended.

    Samples that share one of `MAX_POINTS` places become one point. A sample may lack the field.
    """
    width = (end - start) / MAX_POINTS
    merged: dict[int, list[Record]] = {}
    for sample in samples:
        place = math.floor((epoch(sample["at"]) - start) / width)
        if 0 <= place < MAX_POINTS and field in sample:
            merged.setdefault(place, []).append(sample)
    line = []
    for place, together in sorted(merged.items()):
        values = [float(each[field] or 0) for each in together]
        value = max(values)
        if field in SUMS:
            value = sum(values) / (sum(each["span"] for each in together) / 60)
        line.append(((place + 0.5) / MAX_POINTS, value))
    return line


def parts(line: Sequence[tuple[float, float]], *, gap: float) -> list[list[tuple[float, float]]]:
    """Return the parts of a line between which nothing was sampled for longer than `gap`."""
    found: list[list[tuple[float, float]]] = []
    for point in line:
        if not found or point[0] - found[-1][-1][0] > gap:
            found.append([])
        found[-1].append(point)
    return found


def scale(largest: float) -> float:
    """Return a round number that is at least `largest`, and at least 4: 1, 2, 4 or 8 times a power of ten."""
    if largest <= MARKS:
        return float(MARKS)
    power = 10.0 ** math.floor(math.log10(largest))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= largest)


def _y(share: float) -> float:
    return 6 + (HEIGHT - BELOW - 6) * (1 - share)


def epoch(moment: str) -> float:
    """Return a time of the database as seconds since 1970."""
    return datetime.fromisoformat(moment).timestamp()


def _clock(epoch: float, zone: tzinfo, *, long: bool) -> str:
    return datetime.fromtimestamp(epoch, zone).strftime("%m-%d" if long else "%H:%M")


def zone_name(epoch: float, zone: tzinfo) -> str:
    """Return how a zone is called at a time: `CET`, or `UTC+03` where it has no letters of its own."""
    name = datetime.fromtimestamp(epoch, zone).strftime("%Z")
    return name if name[:1].isalpha() else f"UTC{name}"
