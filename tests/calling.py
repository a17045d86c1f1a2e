"""The caller's side of a real gateway: jobs to submit, and what became of them."""

from typing import Any

import httpx
from sqlalchemy import text

from schema import moves
from schema.engine import Database
from schema.timing import Timing

JOB: dict[str, Any] = {"command": ["true"]}


def submitted(http: httpx.Client, *jobs: dict[str, Any]) -> list[str]:
    answer = http.post("/v1/jobs", json={"jobs": list(jobs)})
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["jobs"]]


def audited(database: Database) -> list[str]:
    return list(database.run(lambda c: c.execute(text("SELECT action FROM audit ORDER BY id")).scalars()))


def granted(database: Database, timing: Timing, job: str) -> tuple[int, int]:
    """Give the job to the only bot; returns its row id and fence."""

    def work(connection: Any) -> tuple[int, int]:
        row = connection.execute(text("SELECT id FROM jobs WHERE public_id = :id FOR UPDATE"), {"id": job}).scalar_one()
        bot = connection.execute(text("SELECT id FROM bots")).scalar_one()
        lease = moves.grant(connection, [moves.Placement(row, bot, {})], assigner="a", strategy="s", ack=timing.ack)
        return row, lease[0].fence

    return database.run(work)
