"""A small pool lives a month in virtual time, with limits, graphs, schedules, faults and operators."""

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from assigner.simulation.runs import make_once
from ops.life.scenario import Life
from schema import clock
from schema.postgres import embedded

#: Within the month the clocks change in Cairo, Berlin, New York and Newfoundland.
START = datetime(2033, 10, 15, tzinfo=UTC)


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """The cluster that each life begins with."""
    data = embedded.scratch("leasehold-test-")
    make_once(data, START.timestamp())
    yield data
    shutil.rmtree(data)


def lived(days: int, like: Path, *, seed: int) -> Life:
    """A life of so many days, on a server of its own. On a shared one other databases use up ids of transactions."""
    with embedded.serve_for_now("leasehold-test-", like=like) as server:
        life = Life(server.url, seed, START, jobs_a_day=6.0, verified_every=12, upkeep_every=6 * 3600.0)
        life.run(days)
    return life


@pytest.mark.long
def test_a_month_of_a_pool_breaks_nothing(made: Path) -> None:
    life = lived(30, made, seed=1)
    assert life.wrong == []
    assert life.done["starts"] > 400
    assert clock.wall() < START.timestamp(), "the host's clock is back"


@pytest.mark.long
def test_equal_seeds_live_equal_lives(made: Path) -> None:
    first, again = (lived(2, made, seed=2) for _ in range(2))
    assert first.digest == again.digest
    assert first.done == again.done
