"""The connections of a whole pool to its database stop without a word, and new ones work: all of it goes on."""

import os
import time
from pathlib import Path

import httpx

from schema.timing import Timing
from tests.support.lossy_proxy import LossyProxy
from tests.support.patience import MINUTE, eventually
from tests.support.servers import Processes

LOSSES_VARIABLE = "LEASEHOLD_TEST_LOSSES"
#: With this statement timeout, seconds, a wait for the server ends after twice as long.
PATIENCE = 1.0


def test_a_pool_goes_on_after_its_connections_were_lost(database_url: str, timing: Timing, scratch: Path) -> None:
    """`LEASEHOLD_TEST_LOSSES=10` loses them ten times."""
    proxy = LossyProxy(database_url)
    config = f"[database]\nstatement_timeout = {PATIENCE}\n"
    with Processes(scratch, proxy.url, timing, config=config) as processes:
        processes.gateway()
        processes.assigner()
        processes.bot()
        headers = {"Authorization": f"Bearer {processes.operator_token}"}
        with httpx.Client(base_url=processes.url, headers=headers, timeout=MINUTE, trust_env=False) as http:

            def submitted(key: str) -> str:
                answer = http.post("/v1/jobs", json={"jobs": [{"command": ["true"], "key": key}]})
                assert answer.status_code == 200
                return str(answer.json()["jobs"][0]["id"])

            for number in range(int(os.environ.get(LOSSES_VARIABLE) or 1)):
                begun = time.monotonic()
                proxy.lose()
                job = eventually(lambda number=number: submitted(f"job-{number}"))  # type: ignore[misc]
                eventually(lambda job=job: http.get(f"/v1/jobs/{job}").json()["state"] == "succeeded")  # type: ignore[misc]
                eventually(lambda: http.get("/readyz").status_code == 200)
                print(f"all of it is back after {time.monotonic() - begun:.1f} s")
    proxy.close()
