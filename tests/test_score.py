"""The score of four terms: each counts what its weight says, and age counts once."""

import pytest

from assigner.books import Rules
from assigner.lines import ByScore, Weights, score
from assigner.ordering import OrderingSettings
from schema.gated import Ageing
from schema.meters import Meter
from schema.openings import Openings, Window, WindowSettings
from schema.requests import JobRequest
from tests.heads import at, book, head, queue
from tests.pool import Pool

HOUR, DAY = 3600.0, 86400.0


@pytest.mark.parametrize(
    ("points", "wait", "efficiency", "window", "expected"),
    [
        (150, DAY, 1, 1, 1.0),
        (150, 0, 0, 0, 0.4),
        (0, DAY, 0, 0, 0.3),
        (0, 0, 1, 0, 0.2),
        (0, 0, 0, 1, 0.1),
        (90, DAY / 2, 1, 1, 0.4 * 0.6 + 0.15 + 0.3),
        (1000, 9 * DAY, 0, 0, 0.7),
        (-50, 0, 0, 0, 0),
    ],
)
def test_sa_08_each_term_is_brought_to_one_before_its_weight(
    points: float, wait: float, efficiency: float, window: float, expected: float
) -> None:
    found = score(Weights(), points=points, gained=0, wait=wait, efficiency=efficiency, window=window)
    assert found == pytest.approx(expected)


def test_a_02_age_counts_once_unless_somebody_asks_for_twice_or_the_wait_has_no_weight() -> None:
    asked = {"points": 60.0, "gained": 20.0, "wait": 10 * HOUR}
    once = score(Weights(), **asked)
    twice = score(Weights(count_age_once=False), **asked)
    assert twice - once == pytest.approx(0.4 * 20 / 150)
    assert score(Weights(wait=0), **asked) == pytest.approx(0.4 * 80 / 150 + 0.3)


def test_a_02_raw_is_the_arithmetic_of_the_original() -> None:
    found = score(Weights(raw=True), points=80, gained=10, wait=DAY / 4)
    assert found == pytest.approx(0.4 * 90 + 0.3 * 0.25 + 0.2 + 0.1)


def test_sa_08_what_is_known_of_resources_and_windows_counts() -> None:
    line = ByScore(Ageing(2.0, 20.0))
    quiet, used_up = (
        Window(
            WindowSettings(name=name, start=0, end=24, types=(name,), meter="plan", usage_threshold=80),
            Meter("plan", used, 100, None, at(0)),
        )
        for name, used in (("quiet", 8.0), ("busy", 72.0))
    )
    heads = [
        head(1, 40, of=queue(job_class="quiet"), seconds=HOUR),
        head(2, 40, of=queue(job_class="busy")),
        head(3, 40, of=queue(job_class="quiet")),
    ]
    now = book(60, openings=Openings([quiet, used_up]))
    assert [round(now.window(each), 2) for each in heads] == [0.9, 0.1, 0.9]
    assert [now.efficiency(each) for each in heads] == [0.5, 1, 1]
    assert [each.job.id for each in line.arranged(heads, now)] == [3, 2, 1]
    assert now.openings.spare("unknown", now.now) == 0, "no window lets it start"


def test_sa_08_an_assigner_that_goes_by_the_score_takes_what_has_waited_for_a_day(pool: Pool) -> None:
    def submitted(job_class: str) -> str:
        (job,) = pool.submit(**JobRequest(command=["true"], job_class=job_class).normal())
        return job

    old, new = submitted("random"), submitted("serious")
    pool.change("UPDATE jobs SET queued_at = now() - interval '1 day' WHERE public_id = CAST(:id AS uuid)", id=old)
    bot = pool.bot(capacity=1)
    assigner = pool.assigner()
    assigner.reconfigure(assigner._settings, assigner._quotas, Rules(OrderingSettings(kind="score")))
    assigner.run_once()
    assert [lease["job"] for lease in bot.take()] == [old]
    assert pool.job(new).state == "queued"


def test_sa_08_an_order_that_nobody_knows_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="'scores' is not an order: there are 'graph', 'rank', 'score'"):
        OrderingSettings(kind="scores")


def test_a_38_a_hastened_job_comes_first_by_score_too() -> None:
    ordering = OrderingSettings(kind="score").made().ordering
    assert [each.job.id for each in ordering.sequence([head(1, -60, since=-DAY), head(2, -1e6)], book())] == [2, 1]


def test_sa_28_the_shortest_come_first_only_where_all_else_is_equal() -> None:
    ordering = OrderingSettings(shortest_first=True).made().ordering
    heads = [head(1, 5, seconds=600), head(2, 5, since=9, seconds=6), head(3, 4, seconds=9000), head(4, 5)]
    assert [each.job.id for each in ordering.sequence(heads, book(60))] == [3, 2, 1, 4]
