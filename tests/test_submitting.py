"""A request that comes alone: the same rows, answers and refusals as among others."""

from typing import Any

import pytest

from schema import moves
from schema.errors import Conflict, QueueFull
from tests.pool import Pool

PLAIN: dict[str, Any] = {"instance": "default", "properties": {}, "payload": {"command": ["true"]}}
FULL: dict[str, Any] = PLAIN | {
    "instance": "ci",
    "properties": {"os": ["linux"], "arch": ["arm", "x86"]},
    "priority": -3,
    "units": 2,
    "label": "nightly",
    "locality_hint": "core",
    "timeout_seconds": 60.5,
    "queue_timeout_seconds": 3600,
    "max_attempts": 7,
    "retry_failed": True,
    "payload": {"command": ["make", "-j"], "env": {"A": "é"}, "stdin": ""},
}
REQUESTS = {
    "plain": PLAIN,
    "nothing but a command": {"payload": {"command": []}},
    "full": FULL,
    "properties in another form": PLAIN | {"properties": {"os": "linux", "arch": ["x86", "arm", "x86"]}},
    "everything unset": dict.fromkeys(["key", "label", "locality_hint", "timeout_seconds", "priority"]) | PLAIN,
    "a deduplication key": PLAIN | {"dedup_key": "d"},
    "a job it was made from": PLAIN | {"from": "0198c5d2-0000-7000-8000-000000000000"},
    "numbers as text": PLAIN | {"priority": "5", "retry_failed": "yes"},
}
ROW = """
SELECT to_jsonb(j) - '{id,public_id,created_at,queued_at,queue_deadline,dedup_key}'::text[] AS job,
    j.queue_deadline - j.created_at AS waits, j.dedup_key IS NOT NULL AS shared, i.name AS instance_name,
    p.properties, w.payload, to_jsonb(e) - '{id,job_id,at}'::text[] AS event
FROM jobs j JOIN instances i ON i.id = j.instance JOIN platforms p ON p.id = j.platform
JOIN job_payloads w ON w.job_id = j.id JOIN job_events e ON e.job_id = j.id
WHERE j.public_id = :id
"""


def alone(pool: Pool, request: dict[str, Any]) -> moves.Submitted:
    return pool.database.run_alone(lambda driver: moves.submit_alone(driver, request, actor="test"))


def rows(pool: Pool) -> Any:
    return pool.row(
        "SELECT (SELECT count(*) FROM jobs) AS jobs, (SELECT count(*) FROM job_payloads) AS payloads, "
        "(SELECT count(*) FROM job_events) AS events, (SELECT count(*) FROM submit_keys) AS keys"
    )


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("first", ["alone", "among others"])
def test_a_request_alone_makes_the_rows_that_it_makes_among_others(
    pool: Pool, request_: dict[str, Any], first: str
) -> None:
    pool.change("INSERT INTO cohorts (name, labels) VALUES ('night', '{nightly}')")
    unshared = request_ | ({"dedup_key": "other"} if "dedup_key" in request_ else {})

    def among(request: dict[str, Any]) -> moves.Submitted:
        return pool.database.run(lambda c: moves.submit(c, [request, PLAIN], actor="test"))[0]

    made = [alone(pool, request_), among(unshared)] if first == "alone" else [among(unshared), alone(pool, request_)]
    one, other = (pool.row(ROW, id=job.public_id) for job in made)
    assert one == other
    assert [job.created for job in made] == [True, True]
    assert [pool.row("SELECT id FROM jobs WHERE public_id = :id", id=job.public_id).id for job in made] == [
        job.job_id for job in made
    ]


@pytest.mark.parametrize("extra", [{}, {"dedup_key": "d"}], ids=["", "deduplicated"])
def test_a_key_alone_makes_one_job_and_refuses_another_request(pool: Pool, extra: dict[str, Any]) -> None:
    request = PLAIN | {"key": "k"} | extra
    first, again = alone(pool, request), alone(pool, request)
    assert (again.job_id, again.public_id) == (first.job_id, first.public_id)
    assert (first.created, again.created) == (True, False)
    assert pool.database.run(lambda c: moves.submit(c, [request, PLAIN], actor="test"))[0] == again
    before = rows(pool)
    with pytest.raises(Conflict, match=r"jobs\[0\].key: 'k' was used before for a different request"):
        alone(pool, request | {"priority": 1})
    assert rows(pool) == before


def test_a_label_that_is_full_refuses_a_request_alone(pool: Pool) -> None:
    pool.change("INSERT INTO queue_limits (label, max_queued) VALUES ('nightly', 1)")
    alone(pool, PLAIN | {"label": "nightly"})
    before = rows(pool)
    with pytest.raises(QueueFull, match="label 'nightly' may have 1 queued jobs, held ones included: no room for 1"):
        alone(pool, PLAIN | {"label": "nightly"})
    assert rows(pool) == before
    assert alone(pool, PLAIN).created


@pytest.mark.parametrize(
    "request_", [{}, {"payload": {"command": "true"}}, PLAIN | {"properties": None}, PLAIN | {"properties": ["os"]}]
)
def test_a_malformed_request_alone_is_refused_by_the_database(pool: Pool, request_: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"a request needs payload.command, an array, and its properties are an object"):
        alone(pool, request_)
    assert rows(pool) == (0, 0, 0, 0)


def test_what_a_constraint_forbids_is_refused_by_its_name(pool: Pool) -> None:
    with pytest.raises(Exception, match="jobs_priority_range"):
        alone(pool, PLAIN | {"priority": 1001})
    assert rows(pool) == (0, 0, 0, 0)


def test_ids_of_one_moment_lie_together(pool: Pool) -> None:
    before = pool.row("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms").ms
    made = alone(pool, PLAIN).public_id
    after = pool.row("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS ms").ms
    assert before <= int(made.replace("-", "")[:12], 16) <= after
    assert made[14] == "7"
