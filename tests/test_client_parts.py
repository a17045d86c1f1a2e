"""How the client cuts large submits into requests that a gateway, and what stands before it, takes."""

import json

import pytest

from assigner.submission import SubmitRequest
from bots import client as client_module
from bots.bodies import Reader
from bots.transport import TooLarge
from schema import limits
from schema.errors import BadInput
from tests.scripted import Answer, Asked, accept, client_for, gateway, in_turn, problem

JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"


def test_large_submits_are_split_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_JOBS", 3)
    monkeypatch.setattr(client_module, "MAX_BYTES", 1000)
    jobs = [{"command": ["x"], "label": str(n), "key": str(n)} for n in range(7)]
    jobs[1]["stdin"] = "x" * 2000
    with gateway(accept) as stands, client_for(stands.url) as client:
        taken = client.submit(jobs)
    assert [job.id for job in taken] == [str(n) for n in range(7)]
    assert [len(asked.body["jobs"]) for asked in stands.asked] == [1, 1, 3, 2]


@pytest.mark.parametrize(
    ("job", "count"),
    [
        ({"command": ["x"], "stdin": "\u00e9\\\n" * 40_000}, 30),
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
        assert len(raw) <= limits.LEAST_BODY
        Reader(SubmitRequest).read(raw)


@pytest.mark.parametrize(
    "refusal",
    [problem(413, "body: is larger than 300 bytes", field="body"), Answer(b"<html>Request Entity Too Large", 413)],
    ids=["by the gateway", "by a proxy"],
)
def test_a_part_that_is_too_large_for_something_on_the_way_is_sent_in_smaller_ones(refusal: Answer) -> None:
    def narrow(asked: Asked) -> Answer:
        return accept(asked) if len(asked.body["jobs"]) <= 2 else refusal

    with gateway(narrow) as stands, client_for(stands.url) as client:
        taken = client.submit([{"command": ["x"], "label": str(n)} for n in range(7)])
    assert [job.id for job in taken] == [str(n) for n in range(7)]
    keys = [job["key"] for asked in stands.asked if len(asked.body["jobs"]) <= 2 for job in asked.body["jobs"]]
    assert keys == [job["key"] for job in stands.asked[0].body["jobs"]]


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (problem(413, "body: is larger than 300 bytes", field="body"), "jobs.1: is larger than 300 bytes"),
        (Answer(b"<html>", 413), "jobs.1: is larger than what is taken on the way to the gateway"),
    ],
    ids=["by the gateway", "by a proxy"],
)
def test_a_job_that_is_too_large_alone_is_named_by_its_place(refusal: Answer, said: str) -> None:
    def narrow(asked: Asked) -> Answer:
        return refusal if any("stdin" in job for job in asked.body["jobs"]) else accept(asked)

    jobs = [{"command": ["x"], "label": "a"}, {"command": ["x"], "label": "b", "stdin": "x" * 300}]
    with gateway(narrow) as stands, client_for(stands.url) as client, pytest.raises(TooLarge) as caught:
        client.submit(jobs)
    assert str(caught.value) == said


def test_a_refusal_in_a_later_part_names_the_place_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_JOBS", 2)
    refusal = problem(400, "jobs.1.priority: too large", field="jobs.1.priority")
    with gateway(in_turn(Answer({"jobs": [{"id": JOB, "created": True}] * 2}), refusal)) as stands:
        with client_for(stands.url) as client, pytest.raises(BadInput) as caught:
            client.submit([{"command": ["x"]}] * 4)
    assert caught.value.field == "jobs.3.priority"
    assert caught.value.reason == "too large"
