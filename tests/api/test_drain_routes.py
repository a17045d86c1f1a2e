"""The operators' routes for drains, and the command that waits for one."""

from typing import Any

import httpx
import pytest
from leasehold.errors import BadInput, LeaseholdError, NotFound

from schema.postgres.engine import Database
from schema.tenancy import drains
from tests.support.http import JOB, Answer, Gateway, audited, call, in_turn, problem, submitted
from tests.support.patience import wait_instead
from tests.support.pool import Pool
from tests.support.servers import Bot, Served


def test_a_bot_is_drained_with_a_deadline(served: Served, operator: httpx.Client, pool: Pool) -> None:
    Bot(served, "b1")
    drained = operator.post("/v1/bots/b1/drain", json={"deadline": 60, "reason": "disk"})
    assert drained.json() == {"name": "b1", "draining": True}
    row = pool.row("SELECT draining, extract(epoch FROM drain_deadline - now()) AS left FROM bots")
    assert row.draining
    assert 0 < row.left <= 60
    shown = operator.get("/v1/bots/b1").json()
    assert (shown["name"], shown["draining"], shown["leases"]) == ("b1", True, 0)
    assert operator.get("/v1/bots/absent").status_code == 404


def test_an_instance_is_drained_and_put_back(served: Served, operator: httpx.Client, pool: Pool) -> None:
    submitted(operator, JOB | {"instance": "ci"})
    answer = operator.post("/v1/instances/ci/drain", json={"deadline": 0.5})
    assert answer.json() == {"name": "ci", "draining": True}
    assert pool.row("SELECT draining FROM instances WHERE name = 'ci'").draining
    assert operator.post("/v1/instances/ci/drain", json={"draining": False}).status_code == 200
    assert pool.row("SELECT draining, drain_deadline FROM instances WHERE name = 'ci'")[:] == (False, None)
    assert audited(pool.database)[-2:] == ["instance.drain", "instance.undrain"]


def test_assigner_processes_are_listed_and_drained(served: Served, operator: httpx.Client, database: Database) -> None:
    database.run(lambda c: drains.record_assigner_alive(c, "host", starts=True))
    (listed,) = operator.get("/v1/assigners").json()["assigners"]
    assert (listed["name"], listed["state"], listed["draining"]) == ("host", "running", False)
    assert operator.post("/v1/assigners/host/drain", json={}).json() == {"name": "host", "draining": True}
    assert operator.get("/v1/assigners").json()["assigners"][0]["state"] == "draining"
    assert audited(database)[-1] == "assigner.drain"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("bots/b1", {"deadline": -1}, 422),
        ("bots/b1", {"deadline": "soon"}, 422),
        ("bots/b1", {"draining": False, "deadline": 1}, 400),
        ("instances/default", {"deadline": 1e12}, 422),
        ("instances/default", {"reason": "x" * 501}, 400),
        ("instances/Bad%20Name", {}, 400),
        ("instances/absent", {}, 404),
        ("assigners/absent", {}, 404),
        ("assigners/absent", {"deadline": 1}, 422),
    ],
)
def test_wrong_drains_are_refused_and_leave_nothing(
    served: Served, operator: httpx.Client, database: Database, path: str, body: dict[str, Any], status: int
) -> None:
    Bot(served, "b1")
    before = audited(database)
    assert operator.post(f"/v1/{path}/drain", json=body).status_code == status
    assert audited(database) == before


def test_only_operators_drain(served: Served, database: Database) -> None:
    with served.client(served.token("submitter")) as submitter:
        for path in ("bots/b1", "instances/default", "assigners/host"):
            assert submitter.post(f"/v1/{path}/drain", json={}).status_code == 403
        assert submitter.get("/v1/assigners").status_code == 403


def bot(leases: int, *, draining: bool = True) -> Answer:
    return Answer({"name": "b1", "draining": draining, "leases": leases})


def test_waiting_for_a_bot_ends_once_it_holds_nothing(
    stands: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    wait_instead(monkeypatch, "sleep", waits.append)
    stands.script = in_turn(Answer({"name": "b1", "draining": True}), bot(2), bot(1), bot(0))
    call("bots", "drain", "b1", "--deadline", "90", "--wait")
    assert capsys.readouterr().out == "b1 holds nothing\n"
    assert stands.paths() == ["POST /v1/bots/b1/drain", *["GET /v1/bots/b1"] * 3]
    assert stands.asked[0].body == {"draining": True, "deadline": 90.0}
    assert len(waits) == 2


def test_waiting_for_a_bot_ends_when_the_drain_is_taken_back_or_the_bot_is_gone(stands: Gateway) -> None:
    stands.script = in_turn(Answer({"name": "b1", "draining": True}), bot(2, draining=False))
    with pytest.raises(LeaseholdError, match="ended the drain"):
        call("bots", "drain", "b1", "--wait")
    stands.script = in_turn(Answer({"name": "b1", "draining": True}), problem(404, "bot: no bot 'b1'"))
    with pytest.raises(NotFound):
        call("bots", "drain", "b1", "--wait")


@pytest.mark.parametrize("options", [["--wait"], ["--deadline", "5"]])
def test_an_undo_has_nothing_to_wait_for(stands: Gateway, options: list[str]) -> None:
    with pytest.raises(BadInput, match="--undo"):
        call("bots", "drain", "b1", "--undo", *options)
    assert stands.asked == []
