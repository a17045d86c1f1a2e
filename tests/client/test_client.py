"""The client against a gateway that answers what the test says, and against a real one."""

import base64
import json
import random
import socket
import ssl
import tempfile
import traceback
from pathlib import Path
from typing import Any, get_args
from uuid import UUID

import pytest
from leasehold import client as client_client
from leasehold.calls import operators as calls
from leasehold.client import Client
from leasehold.errors import (
    BadInput,
    Conflict,
    Forbidden,
    LeaseholdError,
    NoAnswer,
    NotFound,
    NotReady,
    QueueFull,
    Unauthorised,
)
from leasehold.transport import NoGateway, TooLarge, Transport, _proxy, address

from assigner.api.operators import health, policy
from assigner.api.submission import SubmitRequest
from bots.gateway.middleware import BodyReader
from schema import audit
from schema.diagnostics.checks import Verdict
from schema.tenancy import processes
from tests.support.http import JOB_COMMANDING as JOB
from tests.support.http import OTHER, Answer, ReceivedRequest, accept, client_for, gateway, in_turn, problem
from tests.support.pool import Pool
from tests.support.servers import Served


def test_certificates_are_verified_against_known_authorities() -> None:
    with client_for("https://pool.example") as client:
        context = client._transport._connections._trusted
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert context.cert_store_stats()["x509_ca"]


def test_a_gateway_elsewhere_is_reached_through_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway(accept) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("http://", "http://me:secret@"))
        with client_for("http://pool.example:8080/below") as client:
            taken = client.submit([{"command": ["true"], "label": "a"}])
    assert [job.id for job in taken] == ["a"]
    assert proxy.asked[0].path == "/below/v1/jobs"


def test_an_address_or_a_token_of_any_characters_is_sent_or_refused() -> None:
    with gateway(accept) as served:
        with client_for(f"{served.url}/\u00fc%20") as client:
            client.submit([{"command": ["true"], "label": "a"}])
    assert served.asked[0].path == "/%C3%BC%20/v1/jobs"
    for token in ("", "lh_\u00fc", "lh_\u20ac", "lh_\r\nA: b"):
        with pytest.raises(Unauthorised, match="is empty or has characters that no token has"):
            Transport("http://127.0.0.1:1", token, chance=random.Random(0), timeout=1, patience=0)


@pytest.mark.parametrize("excepted", ["gw.example", "gw.example:7411"])
def test_no_proxy_may_name_a_port(monkeypatch: pytest.MonkeyPatch, excepted: str) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert _proxy(address("http://gw.example:7411")) is not None
    monkeypatch.setenv("no_proxy", excepted)
    assert _proxy(address("http://gw.example:7411")) is None


def test_a_connection_that_the_gateway_closed_while_idle_is_not_used_again() -> None:
    with gateway(accept) as stands, client_for(stands.url) as client:
        client.submit([{"command": ["true"], "label": "a"}])
        (idle,) = client._transport._connections._idle
        idle.sock.shutdown(socket.SHUT_RDWR)
        client.submit([{"command": ["true"], "label": "b"}])
        assert client._transport._connections._idle != [idle]
    assert len(stands.asked) == 2


def test_a_submit_sends_the_token_answers_in_order_and_gives_a_key_to_what_has_none() -> None:
    with gateway(accept) as stands, client_for(stands.url) as client:
        taken = client.submit([{"command": ["x"], "label": "a"}, {"command": ["x"], "label": "b", "key": "mine"}])
    assert [(job.id, job.created) for job in taken] == [("a", True), ("b", True)]
    assert stands.asked[0].token == "Bearer lh_operator_x_y"
    first, second = stands.asked[0].body["jobs"]
    assert UUID(first["key"].removeprefix("auto:"))
    assert second["key"] == "mine"


def test_a_submit_whose_answer_was_lost_is_sent_again_with_the_same_keys() -> None:
    with gateway(in_turn(Answer(cut=True), Answer({"jobs": [{"id": JOB, "created": False}]}))) as stands:
        with client_for(stands.url) as client:
            taken = client.submit([{"command": ["true"]}])
    assert [job.id for job in taken] == [JOB]
    assert len(stands.asked) == 2
    assert stands.asked[0].body == stands.asked[1].body


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_gateway_that_is_busy_or_away_is_asked_again(status: int) -> None:
    with gateway(in_turn(problem(status, "later"), Answer({"queued": 0}))) as stands:
        with client_for(stands.url) as client:
            assert client.status() == {"queued": 0}
    assert len(stands.asked) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 431])
@pytest.mark.parametrize("body", [b"<html>", {"message": "Forbidden"}], ids=["page", "json"])
def test_what_a_proxy_refuses_is_asked_again_and_is_no_word_of_a_gateway(status: int, body: Any) -> None:
    with gateway(in_turn(Answer(body, status), Answer({"queued": 0}))) as stands, client_for(stands.url) as client:
        assert client.status() == {"queued": 0}
    with gateway(in_turn(Answer(body, status))) as stands, client_for(stands.url, patience=0.1) as client:
        with pytest.raises(LeaseholdError, match=f"is not a Leasehold gateway: it says {status} ") as caught:
            client.status()
    assert type(caught.value) is NoGateway
    with gateway(in_turn(Answer({"queued": 0}), Answer(body, status))) as stands:
        with client_for(stands.url, patience=0.1) as client:
            client.status()
            with pytest.raises(NoGateway, match=f"^something before the gateway at .* says {status} "):
                client.status()


def test_what_an_earlier_try_has_removed_is_removed() -> None:
    gone = problem(404, "there is no quota")
    with gateway(in_turn(Answer(cut=True), gone)) as stands, client_for(stands.url) as client:
        client.remove_quota("default", "team-a")
        assert len(stands.asked) == 2
        with pytest.raises(NotFound):
            client.remove_quota("default", "team-a")
    with gateway(in_turn(problem(503, "later"), gone)) as stands, client_for(stands.url) as client:
        with pytest.raises(NotFound):
            client.remove_quota("default", "team-a")


def test_patience_ends_and_the_last_answer_is_told() -> None:
    with gateway(in_turn(problem(503, "the database cannot be reached"))) as stands:
        with client_for(stands.url, patience=0.1) as client, pytest.raises(NotReady, match="cannot be reached"):
            client.status()
    assert len(stands.asked) > 1


def test_nobody_at_the_address_and_one_who_does_not_answer_are_told_apart() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with client_for(url, patience=0.1) as client, pytest.raises(NoAnswer) as caught:
            client.status()
    assert str(caught.value) == f"cannot reach the gateway at {url}: is it running?"
    assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
    with gateway(in_turn(Answer(cut=True))) as stands:
        with client_for(stands.url, patience=0.1) as client, pytest.raises(NoAnswer) as caught:
            client.status()
    assert str(caught.value).startswith(f"the gateway at {stands.url} takes connections and does not answer")


def test_a_gateway_that_does_not_answer_in_time_is_asked_whether_its_database_is_away() -> None:
    def asked(request: ReceivedRequest) -> Answer:
        return problem(503, "the database cannot be reached") if request.path == "/readyz" else Answer(cut=True)

    with gateway(asked) as stands, client_for(stands.url, patience=0.1) as client:
        with pytest.raises(NotReady, match=r"^the database cannot be reached$"):
            client.status()
    with gateway(asked) as stands, client_for(stands.url, patience=0.0) as client:
        with pytest.raises(NoAnswer, match="takes connections and does not answer"):
            client.status()
    assert [each.path for each in stands.asked] == ["/v1/status"], "who has a deadline does not ask"


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (problem(400, "priority: must be at most 1000", field="priority"), BadInput, "priority: must be at most 1000"),
        (problem(401, "no token"), Unauthorised, "no token"),
        (problem(403, "not yours"), Forbidden, "not yours"),
        (problem(404, "no such\x1b[2J job"), NotFound, "no such"),
        (problem(409, "the key is taken", code="key_reused"), Conflict, "the key is taken"),
        (problem(500, "the gateway failed"), LeaseholdError, "the gateway answered 500: the gateway failed"),
        (Answer({"detail": "Not Found"}, 404), NotFound, "Not Found"),
        (Answer(b"<html>", 413), TooLarge, "is larger than a proxy before the gateway accepts"),
        (Answer(b"<html>"), LeaseholdError, "is not a Leasehold gateway"),
    ],
)
def test_a_refusal_becomes_the_error_it_stands_for(answer: Answer, kind: type[Exception], text: str) -> None:
    with gateway(in_turn(answer)) as stands, client_for(stands.url) as client, pytest.raises(kind) as caught:
        client.show(JOB)
    assert type(caught.value) is kind
    assert text in str(caught.value)
    assert "\x1b" not in str(caught.value), "it cannot write to the terminal"


@pytest.mark.parametrize("jobs", [{"metadata": ["build=1"]}, [JOB] * 501], ids=["filter", "ids"])
def test_an_act_that_is_refused_midway_tells_what_was_done_before(jobs: Any) -> None:
    done = [{"id": JOB, "state": "failed", "job": OTHER, "changed": True}, {"id": OTHER, "changed": False}]
    script = in_turn(Answer({"jobs": done, "next": "here"}), problem(409, "no room for 1 more", code="queue_full"))
    with gateway(script) as stands, client_for(stands.url) as client:
        with pytest.raises(QueueFull) as caught:
            client.backlog.requeue(jobs, key="again")
        assert caught.value.__notes__ == ["1 job was changed before, with the key again"]
        with pytest.raises(QueueFull) as caught:
            client.backlog.requeue(jobs, key="again")
        assert not hasattr(caught.value, "__notes__"), "nothing was done before the first call"


def test_a_cancellation_that_is_refused_midway_tells_what_was_done_before() -> None:
    done = [{"id": JOB, "state": "cancelled", "changed": True}]
    script = in_turn(Answer({"jobs": done}), problem(403, "not yours"))
    with gateway(script) as stands, client_for(stands.url) as client, pytest.raises(Forbidden) as caught:
        client.cancel([JOB] * 1001)
    assert caught.value.__notes__ == ["1 job was changed before"]


def test_wait_tells_each_job_once_as_it_finishes() -> None:
    def record(job: str, state: str) -> dict[str, Any]:
        return {"id": job, "state": state}

    script = in_turn(
        Answer({"jobs": [record(JOB, "running"), record(OTHER, "succeeded")], "done": False}),
        Answer({"jobs": [record(JOB, "failed")], "done": True}),
    )
    with gateway(script) as stands, client_for(stands.url) as client:
        told = [(job["id"], job["state"]) for job in client.wait([JOB, OTHER])]
    assert told == [(OTHER, "succeeded"), (JOB, "failed")]
    assert [asked.body["ids"] for asked in stands.asked] == [[JOB, OTHER], [JOB]]


def test_jobs_of_several_parts_are_looked_at_in_turn_and_none_waits_for_the_hold_of_the_others() -> None:
    ids = [str(UUID(int=n)) for n in range(client_client.MAX_IDS + 1)]

    def script(asked: ReceivedRequest) -> Answer:
        last = asked.body["ids"] == ids[-1:]
        return Answer({"jobs": [{"id": job, "state": "dead" if last else "queued"} for job in asked.body["ids"]]})

    with gateway(script) as stands, client_for(stands.url) as client:
        assert next(client.wait(ids))["id"] == ids[-1]
    assert [asked.body["wait"] for asked in stands.asked] == [0.5, 0.5]


def test_wait_ends_when_its_time_is_up() -> None:
    with gateway(in_turn(Answer({"jobs": [{"id": JOB, "state": "queued"}], "done": False}))) as stands:
        with client_for(stands.url) as client:
            assert list(client.wait([JOB], timeout=0.05)) == []
    assert stands.asked[-1].body["wait"] <= 0.05


def test_follow_reads_on_where_it_stopped_and_starts_again_when_the_job_does() -> None:
    script = in_turn(
        output(0, b"one\n", state="running", attempt=1, final=False),
        output(4, b"half", state="running", attempt=1, final=False),
        output(8, b"tail", state="running", attempt=2, final=False),
        output(0, b"full tail", state="succeeded", attempt=2, final=True),
    )
    with gateway(script) as stands, client_for(stands.url) as client:
        assert [piece.data for piece in client.follow(JOB)] == [b"one\n", b"half", b"full tail"]
    assert [asked.query["start"] for asked in stands.asked] == ["0", "4", "8", "0"]


def output(start: int, data: bytes, *, state: str, attempt: int, final: bool) -> Answer:
    encoded = base64.b64encode(data).decode()
    end = start + len(data)
    return Answer({"start": start, "data": encoded, "next": end, "state": state, "attempt": attempt, "final": final})


def test_jobs_that_had_ended_are_refused_only_if_there_are_no_others() -> None:
    ids = [str(UUID(int=n)) for n in range(client_client.MAX_IDS + 1)]
    over = problem(409, "job is dead already; results are kept", code="already_final")
    cancelled = Answer({"jobs": [{"id": ids[-1], "state": "cancelled", "changed": True}]})
    states = Answer({"jobs": [{"id": job, "state": "dead"} for job in ids[:-1]]})
    with gateway(in_turn(over, states, cancelled)) as stands, client_for(stands.url) as client:
        answers = client.cancel(ids)
    assert [job["id"] for job in answers] == ids
    assert [job["changed"] for job in answers] == [False] * client_client.MAX_IDS + [True]
    with gateway(in_turn(over, states, over)) as stands, client_for(stands.url) as client:
        with pytest.raises(Conflict) as refused:
            client.cancel(ids)
    assert refused.value.code == "already_final"


def test_a_gateway_on_a_unix_socket_is_reached() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "gateway.sock")
        with gateway(in_turn(Answer({"queued": 3})), unix=path) as stands, client_for(stands.url) as client:
            assert client.status() == {"queued": 3}


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "ftp://host", "http://", "http://h:99999", "http+unix://a/b", "http://u:p@h"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(BadInput):
        client_for(url)


@pytest.mark.parametrize("job", ["", "..", "x/y", "../../healthz", "é"])
def test_an_id_that_is_none_is_refused_before_anything_is_sent(job: str) -> None:
    with gateway(accept) as stands, client_for(stands.url) as client:
        for call in (client.show, lambda id: client.cancel([id]), lambda id: list(client.follow(id))):
            with pytest.raises(BadInput, match="not the id of a job"):
                call(job)
    assert stands.asked == []


def test_the_client_and_a_real_gateway_understand_each_other(served: Served) -> None:
    request = {"command": ["true"], "label": "x", "key": "k"}
    with Client(served.url, served.token("operator"), chance=random.Random(5)) as client:
        first, again = client.submit([request]), client.submit([request])
        assert (first[0].created, again[0].created, again[0].id == first[0].id) == (True, False, True)
        assert client.status()["jobs"] == {"queued": 1}
        assert client.bots() == []
        with pytest.raises(Conflict) as caught:
            client.submit([request | {"command": ["false"]}])
        assert caught.value.code == "key_reused"
        with pytest.raises(BadInput) as refused:
            client.submit([{"command": ["true"]}, {"command": ["true"], "priority": 5000}])
        assert refused.value.field == "jobs.1.priority"
        for absent in (lambda: client.show(OTHER), lambda: client.drain("nobody")):
            with pytest.raises(NotFound):
                absent()
    for token, kind in ((served.token("bot", bot="b1"), Forbidden), ("lh_operator_x_y", Unauthorised)):
        with Client(served.url, token, chance=random.Random(6)) as client, pytest.raises(kind):
            client.status()


# How the client cuts large submits into requests that a gateway, and what stands before it, takes.


def test_large_submits_are_split_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_client, "MAX_JOBS", 3)
    monkeypatch.setattr(client_client, "MAX_BYTES", 1000)
    jobs = [{"command": ["x"], "label": str(n), "key": str(n)} for n in range(7)]
    jobs[1]["stdin"] = "x" * 2000
    with gateway(accept) as stands, client_for(stands.url) as client:
        taken = client.submit(jobs)
    assert [job.id for job in taken] == [str(n) for n in range(7)]
    assert [len(asked.body["jobs"]) for asked in stands.asked] == [1, 1, 3, 2]


@pytest.mark.parametrize(
    ("job", "count"),
    [
        ({"command": ["x"], "stdin": "\u00e9\\\n" * 40_000}, 40),
        ({"command": ["x", *[""] * 4_000], "properties": {"os": ["a"] * 1_000}}, 210),
    ],
    ids=["many bytes", "many values"],
)
def test_no_part_is_more_than_every_gateway_takes(job: dict[str, object], count: int) -> None:
    jobs = [job | {"label": str(n)} for n in range(count)]
    with gateway(accept) as stands, client_for(stands.url) as client:
        taken = client.submit(jobs)
    assert [one.id for one in taken] == [str(n) for n in range(count)]
    assert len(stands.asked) > 1
    for asked in stands.asked:
        raw = json.dumps(asked.body, ensure_ascii=False, separators=(",", ":")).encode()
        assert len(raw) <= client_client.MAX_BYTES
        BodyReader(SubmitRequest).read(raw)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (problem(413, "body: is larger than 300 bytes", field="body"), "jobs.1: is larger than 300 bytes"),
        (Answer(b"<html>", 413), "jobs.1: is larger than a proxy before the gateway accepts"),
    ],
    ids=["by the gateway", "by a proxy"],
)
def test_a_part_too_large_on_the_way_is_sent_in_smaller_ones_and_a_job_is_named(refusal: Answer, said: str) -> None:
    def narrow(asked: ReceivedRequest) -> Answer:
        jobs = asked.body["jobs"]
        return refusal if len(jobs) > 2 or any("stdin" in job for job in jobs) else accept(asked)

    with gateway(narrow) as stands, client_for(stands.url) as client:
        taken = client.submit([{"command": ["x"], "label": str(n)} for n in range(7)])
        assert [job.id for job in taken] == [str(n) for n in range(7)]
        keys = [job["key"] for asked in stands.asked if len(asked.body["jobs"]) <= 2 for job in asked.body["jobs"]]
        assert keys == [job["key"] for job in stands.asked[0].body["jobs"]]
        with pytest.raises(TooLarge) as caught:
            client.submit([{"command": ["x"], "label": "a"}, {"command": ["x"], "label": "b", "stdin": "x" * 300}])
    assert str(caught.value) == said


def test_a_refusal_in_a_later_part_names_the_place_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_client, "MAX_JOBS", 2)
    refusal = problem(400, "jobs.1.priority: too large", field="jobs.1.priority")
    with gateway(in_turn(Answer({"jobs": [{"id": JOB, "created": True}] * 2}), refusal)) as stands:
        with client_for(stands.url) as client, pytest.raises(BadInput) as caught:
            client.submit([{"command": ["x"]}] * 4)
    assert caught.value.field == "jobs.3.priority"
    assert caught.value.reason == "too large"


# Calls of operators


def test_operators_programs_read_health_and_policy(pool: Pool, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(served.url, served.token("operator"), chance=random.Random(1)) as client:
        found = client.operators
        assert [alert["name"] for alert in found.alerts()] == ["LeaseholdUpkeepStands"]
        assert {check["name"]: check["verdict"] for check in found.doctor()}["schema"] == "ok"
        checked = found.invariants(seconds=60)
        assert (checked["finished"], [each["rows"] for each in checked["invariants"] if each["rows"]]) == (True, [])
        assert (found.gateways(), found.settings(), found.decisions()) == ([], [], [])
        with pytest.raises(NotFound, match="none has been sampled yet"):
            found.scores(weights={"locality": 1.0})
        with pytest.raises(BadInput, match="locality"):
            found.scores(weights={"locality": 1e9})
        # Lists are whole though a page has few rows.
        for n in range(5):
            pool.database.run(lambda c, n=n: audit.write(c, "limit.set", actor="op", subject=f"s{n}"))
            pool.database.run(lambda c, n=n: processes.record_gateway_alive(c, f"g{n}", url="http://x", figures={}))
        monkeypatch.setattr(calls, "PAGE", 2)
        monkeypatch.setattr("leasehold.wire.MAX_LIST", 2)
        assert [row["subject"] for row in found.audit()][:5] == ["s4", "s3", "s2", "s1", "s0"]
        assert [each["name"] for each in found.gateways()] == [f"g{n}" for n in range(5)]


TYPES = "Alert Check Invariant Gateway AuditRow SettingsInForce Decision Terms Scored Scores Invariants"


def test_the_types_of_the_client_are_those_of_the_gateway() -> None:
    for name in TYPES.split():
        model = getattr(health, "InvariantList" if name == "Invariants" else name, None) or getattr(policy, name)
        assert getattr(calls, name).__annotations__.keys() == model.model_fields.keys()
    assert set(get_args(calls.Check.__annotations__["verdict"])) == {verdict.value for verdict in Verdict}
