from concurrent.futures import ThreadPoolExecutor

import httpx

from schema import audit
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from tests.support.http import JOB, submitted
from tests.support.patience import NEWS, eventually
from tests.support.pool import Pool
from tests.support.servers import Served


def accesses(database: Database) -> list[tuple[str, str]]:
    query = Statement("SELECT action, subject FROM audit WHERE action LIKE '%.read' ORDER BY id")
    return [(row.action, row.subject) for row in database.run(lambda connection: connection.execute(query).all())]


def test_a_look_is_noted_once_an_hour_for_each_actor_action_and_subject(database: Database) -> None:
    def record_access(action: str = "job.read", actor: str = "operator:x", subject: str = "1") -> None:
        database.run(
            lambda connection: audit.write_access(connection, action, actor=actor, subject=subject, details={"jobs": 1})
        )

    for _ in range(3):
        record_access()
        record_access(subject="2")
        record_access(actor="operator:y")
        record_access(action="output.read")
    assert accesses(database) == [("job.read", "1"), ("job.read", "2"), ("job.read", "1"), ("output.read", "1")]
    database.run(lambda connection: connection.execute(Statement("UPDATE audit SET at = at - interval '61 minutes'")))
    record_access()
    assert accesses(database)[4:] == [("job.read", "1")]


def test_only_the_commit_of_a_noted_look_does_not_wait_for_the_disk(database: Database) -> None:
    def setting(connection: Connection) -> str:
        audit.write_access(connection, "job.read", actor="operator:x", subject="1")
        return str(connection.execute(Statement("SHOW synchronous_commit")).scalar_one())

    usual = database.run(lambda connection: connection.execute(Statement("SHOW synchronous_commit")).scalar_one())
    assert database.run(setting) == "off"
    assert database.run(setting) == usual


def test_the_guard_of_a_look_uses_the_index(database: Database) -> None:
    with database.connect() as connection:
        plan = connection.execute(
            Statement("EXPLAIN SELECT FROM audit WHERE actor = 'a' AND action = 'b' AND subject = 'c' AND at > now()")
        ).scalars()
        assert any("audit_of_actor" in line for line in plan)


def test_an_operator_who_looks_again_and_again_leaves_one_row_and_a_submitter_none(
    served: Served, operator: httpx.Client, database: Database
) -> None:
    (job,) = submitted(operator, JOB)
    with served.client(served.token("submitter")) as submitter:
        for _ in range(3):
            assert submitter.get(f"/v1/jobs/{job}").status_code == 200
            assert submitter.post("/v1/jobs/wait", json={"ids": [job]}).status_code == 200
    assert accesses(database) == []
    for _ in range(3):
        assert operator.get(f"/v1/jobs/{job}").status_code == 200
        assert operator.get(f"/v1/jobs/{job}/output").status_code == 200
        assert operator.post("/v1/jobs/wait", json={"ids": [job]}).status_code == 200
    assert accesses(database) == [("job.read", job), ("output.read", job), ("jobs.read", job)]


def test_a_long_poll_is_noted_at_its_start(served: Served, operator: httpx.Client, database: Database) -> None:
    first, second = submitted(operator, JOB, JOB)
    with ThreadPoolExecutor() as threads, served.client(served.token("operator")) as other:
        held = [
            threads.submit(operator.post, "/v1/jobs/wait", json={"ids": [first, second], "wait": 60}),
            threads.submit(operator.get, f"/v1/jobs/{first}/output?wait=60"),
        ]
        eventually(lambda: len(accesses(database)) == 2)
        assert served.waits("done") == 2
        before = accesses(database)
        other.post("/v1/jobs/cancel", json={"ids": [first]})
        other.post("/v1/jobs/cancel", json={"ids": [second]})
        assert [answer.result(NEWS).status_code for answer in held] == [200, 200]
    assert accesses(database) == before
    assert sorted(before) == [("jobs.read", first), ("output.read", first)]


def test_cancelling_only_what_is_over_is_refused_and_a_mix_is_not(operator: httpx.Client, pool: Pool) -> None:
    late = JOB | {"queue_timeout_seconds": 1e-5}
    one, two, three, four = submitted(operator, late, late, JOB, JOB)
    assert operator.post("/v1/jobs/cancel", json={"ids": [four]}).status_code == 200
    again = operator.post("/v1/jobs/cancel", json={"ids": [four]})
    assert (again.status_code, again.json()["jobs"][0]["changed"]) == (200, False), "a repeated cancel is no error"
    pool.upkeep().run_once()
    alone = operator.post("/v1/jobs/cancel", json={"ids": [one.upper()]})
    assert (alone.status_code, alone.json()["code"]) == (409, "already_final")
    assert alone.json()["detail"] == f"job '{one}' is dead already; results are kept"
    both = operator.post("/v1/jobs/cancel", json={"ids": [one, two]})
    assert (both.status_code, both.json()["code"]) == (409, "already_final")
    assert "the other 1" in both.json()["detail"]
    for ids in ([one, "nonsense"], [one, "0" * 32], [one, three]):
        assert operator.post("/v1/jobs/cancel", json={"ids": ids}).status_code == 200
    assert operator.post("/v1/jobs/cancel", json={"ids": ["0" * 32]}).status_code == 404
    assert operator.get(f"/v1/jobs/{three}").json()["state"] == "cancelled"
