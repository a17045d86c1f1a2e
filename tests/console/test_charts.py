"""Lines of charts: merged samples, gaps, and the largest figure at the side."""

from datetime import UTC, datetime
from typing import Any

import pytest

from bots.console.charts import MAX_POINTS, parts, points, scale


def sample(at: float, span: int = 60, **fields: Any) -> dict[str, Any]:
    moment = datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
    return {"at": moment, "span": span, "waiting": 0, "failed": 0, "oldest_wait": None} | fields


def test_samples_that_share_a_place_become_one_point() -> None:
    hour = 3600.0
    crowded = [sample(60 * n, waiting=n, failed=2) for n in range(24 * 60)]
    line = points(crowded, "waiting", start=0, end=24 * hour)
    assert len(line) == MAX_POINTS
    assert [value for _, value in line[:2]] == [5, 11]
    assert {value for _, value in points(crowded, "failed", start=0, end=24 * hour)} == {2}
    assert points([sample(0, span=600, failed=30)], "failed", start=0, end=hour)[0][1] == 3
    assert points([sample(0), sample(hour), sample(-1)], "oldest_wait", start=0, end=hour) == [(0.5 / MAX_POINTS, 0)]


def test_a_time_without_samples_is_a_gap_in_the_line() -> None:
    line = [(0.0, 1.0), (0.1, 2.0), (0.5, 3.0)]
    assert parts(line, gap=0.2) == [line[:2], line[2:]]
    assert parts([], gap=0.2) == []


@pytest.mark.parametrize(("largest", "most"), [(0, 4), (4, 4), (5, 8), (9, 10), (101, 200), (350, 400), (999, 1000)])
def test_the_side_of_a_chart_has_round_figures(largest: float, most: float) -> None:
    assert scale(largest) == most
