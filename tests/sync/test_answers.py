"""Answers to bots: written without the models that describe them, and without leases for which nothing has changed."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bots.protocol import SyncAnswer, Work
from bots.sync.call import Due, answer_message
from schema.moves.cancel import cancel
from tests.support.pool import Bot, Pool, active, completed

LEASE: dict[str, Any] = {
    "public_id": "0192f0c4-1c2d-7000-8000-000000000001", "fence": 4294967297, "state": "pending", "instance": "web",
    "attempts": 2, "stop_reason": None, "timeout_seconds": None, "units": 1, "gpus": None, "checkpoint": None,
    "payload": None,
}  # fmt: skip
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
    answer = answer_message(Due(rows, seq=9, drain=True, expires_in=29.5, sync_in=5.0))

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
    nothing = {"seq": 1, "leases": [], "drain": False, "expires_in": 0.0, "sync_in": 0.0}
    assert json.loads(answer_message(Due([], seq=1, expires_in=0.0, sync_in=0.0))) == nothing


# Leases that a bot holds in advance and leaves out of its reports, because nothing has changed for them


Works = list[dict[str, Any]]


def waiting(pool: Pool, count: int = 4, *, capacity: int | None = None, **fetch: bool) -> tuple[Bot, Works]:
    """Return a bot that has started none of its leases, and these leases. The bot was told of all `count` of them."""
    bot = pool.bot(capacity=capacity or count, sync_service=pool.sync_service(**fetch))
    pool.submit(count)
    pool.assigner().run_once()
    works = bot.sync()["leases"]
    assert len(works) == count
    return bot, works


def jobs(answer: dict[str, Any]) -> list[str]:
    return [lease["job"] for lease in answer["leases"]]


def states(pool: Pool, works: Works) -> list[str]:
    return [pool.job(work["job"]).state for work in works]


def test_unchanged_leases_that_a_bot_does_not_list_are_not_sent_again(pool: Pool) -> None:
    bot, works = waiting(pool)
    pool.submit(2)
    answer = bot.sync(*map(completed, works[:2]), unlisted=2)
    assert states(pool, works) == ["succeeded"] * 2 + ["leased"] * 2
    assert (len(jobs(answer)), answer["unlisted"]) == (2, 2), "only what the call has fetched"
    assert not set(jobs(answer)) & {work["job"] for work in works}

    answer = bot.sync(*map(completed, answer["leases"]), unlisted=2)
    assert (jobs(answer), answer["unlisted"]) == ([], 2)
    answer = bot.sync(*map(completed, works[2:]))
    assert (jobs(answer), answer.get("unlisted")) == ([], None)
    assert states(pool, works) == ["succeeded"] * 4


def test_a_bot_may_list_what_it_runs_beside_what_it_does_not_list(pool: Pool) -> None:
    bot, works = waiting(pool, enabled=False)
    bot.sync(active(works[0]), unlisted=3)
    assert states(pool, works) == ["running"] + ["leased"] * 3
    answer = bot.sync(active(works[0]), completed(works[1]), unlisted=2)
    assert (jobs(answer), answer["unlisted"]) == ([works[0]["job"]], 2)
    assert states(pool, works) == ["running", "succeeded", "leased", "leased"]


def test_leases_that_run_and_that_a_bot_does_not_list_go_on(pool: Pool) -> None:
    bot, works = waiting(pool, enabled=False)
    bot.sync(*map(active, works))
    answer = bot.sync(unlisted=4)
    assert (jobs(answer), answer["unlisted"]) == ([], 4)
    answer = bot.sync(completed(works[0]), unlisted=3)
    assert (jobs(answer), answer["unlisted"]) == ([], 3)
    assert states(pool, works) == ["succeeded"] + ["running"] * 3
    bot.sync(*map(active, works[1:3]))
    assert states(pool, works)[3] == "queued", "it is lost for a bot that lists all that it holds"


def test_a_lease_that_an_assigner_has_granted_meanwhile_is_told_beside_those_that_are_not_listed(pool: Pool) -> None:
    bot, works = waiting(pool, 3, capacity=4, enabled=False)
    (new,) = pool.submit()
    pool.assigner().run_once()
    answer = bot.sync(completed(works[0]), unlisted=2)
    assert (jobs(answer), answer["unlisted"]) == ([new], 2)
    assert answer["leases"][0]["payload"]
    answer = bot.sync(completed(answer["leases"][0]), unlisted=2)
    assert (jobs(answer), answer["unlisted"]) == ([], 2)


@pytest.mark.parametrize("beside", [True, False])
def test_an_unlisted_lease_that_has_to_stop_is_told_and_ends_when_the_bot_says_so(pool: Pool, beside: bool) -> None:
    bot, works = waiting(pool, enabled=False)
    pool.database.run(lambda c: cancel(c, [works[3]["job"]], instances=None, sync=1.0, actor="test"))
    # With a lease that runs, all that the bot lists is read before. It may have started the others just now.
    answer = bot.sync(active(works[0]) if beside else completed(works[0]), unlisted=3)
    told = {lease["job"]: lease["state"] for lease in answer["leases"]}
    assert told.pop(works[3]["job"]) == "cancelling"
    assert answer.get("unlisted") is None, "the bot holds something else, so all leases are listed"
    assert set(told) == {work["job"] for work in works[1 - beside : 3]}
    assert states(pool, works)[3] == "cancelling"
    bot.sync(*([active(works[0])] if beside else []), completed(works[3], "stopped"), unlisted=2)
    assert states(pool, works)[3] == "cancelled"


def test_a_bot_that_does_not_hold_what_the_database_says_or_calls_again_is_told_everything(pool: Pool) -> None:
    bot, works = waiting(pool, enabled=False)
    bot.sync(completed(works[0]), unlisted=3)
    bot.seq -= 1
    others = {work["job"] for work in works[1:]}
    repeated = bot.sync(completed(works[0]), unlisted=3)
    bot.seq += 1
    after_one_unknown = bot.sync(unlisted=3)
    wrong = bot.sync(completed(works[1]), unlisted=1)
    assert (set(jobs(repeated)), repeated.get("unlisted")) == (others, None)
    assert (set(jobs(after_one_unknown)), after_one_unknown.get("unlisted")) == (others, None)
    assert (set(jobs(wrong)), wrong.get("unlisted")) == (others - {works[1]["job"]}, None)
    assert all(lease["payload"] for lease in wrong["leases"])
    assert states(pool, works) == ["succeeded"] * 2 + ["leased"] * 2


def test_as_many_leases_as_the_database_knows_are_not_the_same_ones_if_one_ended_and_one_came(pool: Pool) -> None:
    bot, works = waiting(pool, 3, capacity=4, enabled=False)
    late = works[2]["job"]
    pool.database.run(lambda c: cancel(c, [late], instances=None, sync=1.0, actor="test"))
    bot.sync(*map(active, works[:2]), completed(works[2], "stopped"))
    (new,) = pool.submit()
    pool.assigner().run_once()
    # As if the bot had not been answered: it still holds the third one, which is over.
    answer = bot.sync(*map(active, works[:2]), unlisted=1)
    assert answer.get("unlisted") is None
    assert set(jobs(answer)) == {works[0]["job"], works[1]["job"], new}


def test_a_bot_that_lists_nothing_but_holds_something_is_answered_and_gives_it_back_when_it_leaves(pool: Pool) -> None:
    bot, works = waiting(pool, enabled=False)
    assert bot.sync(unlisted=4, wait=10.0)["unlisted"] == 4
    bot.sync(completed(works[0]), unlisted=3, status="gone")
    assert states(pool, works) == ["succeeded"] + ["queued"] * 3
