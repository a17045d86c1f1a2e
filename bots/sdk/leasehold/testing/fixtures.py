"""Fixtures of pytest, which only this module imports: a running pool, and tasks in the test's own process."""

from collections.abc import Iterator

import pytest

from leasehold.pool import Pool
from leasehold.testing.inline_jobs import InlineJobs, inline
from leasehold.testing.running import running_pool


@pytest.fixture(scope="session")
def leasehold_pool() -> Iterator[Pool]:
    """A running pool with two bots, for all tests of the session; with pytest-xdist, for those of one worker."""
    with running_pool() as pool:
        yield pool


@pytest.fixture
def leasehold_inline() -> Iterator[InlineJobs]:
    """Tasks run in the process of the test while it lasts; see `inline`."""
    with inline() as jobs:
        yield jobs
