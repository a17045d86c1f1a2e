"""The server that the suite checks, once for all cases."""

import os
import random
from collections.abc import Iterator

import pytest

from schema.timing import Timing
from tests.support.farm.conformance import Runner, Server, runs_actions
from tests.support.farm.doors import Farm
from tests.support.pool import Pool
from tests.support.servers import Databases


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server that LEASEHOLD_CONFORMANCE names, or else a door on a database and storage of the suite's own."""
    if (address := os.environ.get("LEASEHOLD_CONFORMANCE")) is not None:
        yield Server(address, instance=os.environ.get("LEASEHOLD_CONFORMANCE_INSTANCE", ""))
        return
    cas = request.getfixturevalue("cas")
    databases: Databases = request.getfixturevalue("databases")
    url = databases.make(template=request.getfixturevalue("template"), warm=True)
    with databases.connected(url) as database:
        pool = Pool(database, Timing(sync=0.5, ttl=60, reap=0.2, ack=15, poll=0.1), random.Random(0))
        farm = Farm(pool, cas)
        runner = Runner(farm)
        yield Server(farm.address, instance="default", runner=runner, runs=runs_actions())
        runner.stop()
        farm.stop()
    findings = databases.findings(url)
    databases.give_back(url)
    assert not findings
