"""Answers to bots, which are written without the models that describe them."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bots.protocol import SyncAnswer, Work
from bots.sync.call import answer_message

LEASE: dict[str, Any] = {
    "public_id": "0192f0c4-1c2d-7000-8000-000000000001",
    "fence": 4294967297,
    "state": "pending",
    "instance": "web",
    "attempts": 2,
    "stop_reason": None,
    "timeout_seconds": None,
    "units": 1,
    "gpus": None,
    "checkpoint": None,
    "payload": None,
}
PAYLOAD = {"command": ["echo", 'quoted "text"', "ü\n"], "env": {"A": "\\"}}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"payload": json.dumps(PAYLOAD)},
        {"payload": json.dumps(PAYLOAD, ensure_ascii=False), "checkpoint": '{"at": "ü"}', "gpus": [0, 3], "units": 7},
        {"state": "cancelling", "stop_reason": "preempt", "timeout_seconds": 1e-05},
        {"state": "active", "timeout_seconds": 60.0},
    ],
)
def test_an_answer_says_what_its_models_say(more: dict[str, Any]) -> None:
    row = {**LEASE, **more}
    rows = cast(Any, [SimpleNamespace(**row), SimpleNamespace(**LEASE)])
    answer = answer_message(rows, seq=9, drain=True, expires_in=29.5, sync_in=5.0)

    def work(row: dict[str, Any]) -> Work:
        return Work(
            job=row["public_id"],
            fence=row["fence"],
            state=row["state"],
            stop_reason=row["stop_reason"],
            instance=row["instance"],
            attempt=row["attempts"],
            timeout=row["timeout_seconds"],
            units=None if row["units"] == 1 else row["units"],
            payload=None if row["payload"] is None else json.loads(row["payload"]),
            gpus=row["gpus"],
            checkpoint=row["checkpoint"],
        )

    meant = SyncAnswer(seq=9, leases=[work(row), work(LEASE)], drain=True, expires_in=29.5, sync_in=5.0)
    assert SyncAnswer.model_validate_json(answer) == meant
    assert json.loads(answer) == json.loads(meant.model_dump_json(exclude_defaults=True))


def test_an_answer_without_leases_says_that_the_bot_has_none() -> None:
    assert json.loads(answer_message([], seq=1, expires_in=0.0, sync_in=0.0)) == {
        "seq": 1,
        "leases": [],
        "drain": False,
        "expires_in": 0.0,
        "sync_in": 0.0,
    }
