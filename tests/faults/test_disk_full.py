"""The server's disk is full: a real file system without room."""

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from schema.postgres import embedded, migrate
from schema.timing import Timing
from tests.support.servers import opened, serving


@pytest.fixture
def small_disk(scratch: Path) -> Iterator[Path]:
    """A file system of its own with 140 MB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=140m,mode=711", "tmpfs", str(scratch)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a file system, and not in every container")
    yield scratch
    subprocess.run(["umount", "--lazy", str(scratch)], check=True)


def test_a_full_disk_is_told_and_work_goes_on_after_it(small_disk: Path, timing: Timing, chance: random.Random) -> None:
    # A text that cannot be compressed, so that the tables have to grow.
    job = {"command": ["echo", chance.randbytes(30_000).hex()]}
    filling = small_disk / "filling"
    with embedded.serve(small_disk / "data", durable=False) as server:
        database = opened(server.url)
        migrate.upgrade(database)
        with serving(database, timing, wakeups=False) as served, served.client(served.token("operator")) as http:
            with suppress(OSError), filling.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(65536))
            refused = [http.get("/readyz"), http.post("/v1/jobs", json={"jobs": [job] * 40})]
            filling.unlink()
            answers = [http.get("/readyz"), http.post("/v1/jobs", json={"jobs": [job]})]
        database.close()
    for answer in refused:
        assert (answer.status_code, answer.headers["content-type"]) == (503, "application/problem+json")
        assert answer.json()["detail"] == "the database has no disk space left"
    assert [answer.status_code for answer in answers] == [200, 200]
