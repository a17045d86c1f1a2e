"""The points of charts of a simulation: units in use and waits over time, by instance."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from assigner.simulation.records import Records
from assigner.simulation.report import quantile, wait_of

#: Parts of the span: each is a point of a chart.
POINTS = 60
#: The most instances that a chart names. The others are one line together.
MOST_LINES = 8
OTHERS = "others"


def largest(runs: Iterable[Records]) -> list[str]:
    """The instances with the most work, in the order of their names."""
    used: dict[str, float] = defaultdict(float)
    for records in runs:
        for lease in records.leases:
            used[lease.instance] += lease.units
    return sorted(sorted(used, key=lambda name: -used[name])[:MOST_LINES])


def _group(instance: str, names: Sequence[str]) -> str:
    return instance if instance in names else OTHERS


def units_in_use(records: Records, names: Sequence[str]) -> dict[str, list[float]]:
    """Return the mean units in use in each part of the span, by instance."""
    size = (records.until - records.since) / POINTS
    found: dict[str, list[float]] = defaultdict(lambda: [0.0] * POINTS)
    for lease in records.leases:
        start = max(lease.granted, records.since)
        end = min(records.until if lease.ended is None else lease.ended, records.until)
        line = found[_group(lease.instance, names)]
        for part in range(int((start - records.since) / size), POINTS):
            begin = records.since + part * size
            if begin >= end:
                break
            line[part] += lease.units * (min(end, begin + size) - max(start, begin)) / size
    return dict(sorted(found.items()))


def waits(records: Records, names: Sequence[str]) -> dict[str, list[float | None]]:
    """Return the 95 % quantile of the waits of the jobs that started in each part of the span, by instance."""
    size = (records.until - records.since) / POINTS
    parts: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for job in records.jobs:
        if job.started is not None and records.since <= job.started < records.until:
            part = int((job.started - records.since) / size)
            parts[_group(job.instance, names)][part].append(wait_of(job, records))
    return {
        name: [quantile(sorted(found[part]), 0.95) if part in found else None for part in range(POINTS)]
        for name, found in sorted(parts.items())
    }
