"""A small pool lives a month in virtual time, with limits, graphs, schedules, faults and operators."""

from datetime import UTC, datetime

from ops.life.scenario import Life
from schema import clock
from tests.support.servers import serving_in_memory

#: Within the month the clocks change in Cairo, Berlin, New York and Newfoundland.
START = datetime(2033, 10, 15, tzinfo=UTC)


def lived(days: int, *, seed: int) -> Life:
    """A life of so many days, on a server of its own. On a shared one other databases use up ids of transactions."""
    with serving_in_memory() as url:
        life = Life(url, seed, START, jobs_a_day=6.0, verified_every=12, upkeep_every=6 * 3600.0)
        life.run(days)
    return life


def test_a_month_of_a_pool_breaks_nothing() -> None:
    life = lived(30, seed=1)
    assert life.wrong == []
    assert life.done["starts"] > 400
    assert clock.wall() < START.timestamp(), "the host's clock is back"


def test_equal_seeds_live_equal_lives() -> None:
    first, again = (lived(2, seed=2) for _ in range(2))
    assert first.digest == again.digest
    assert first.done == again.done
