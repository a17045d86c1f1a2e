"""Calls of tasks that a bot has not imported, as while a new version of a program comes to bots one after the other."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from assigner.queries import jobs
from bots.protocol import MAX_TASK, MAX_TASKS_BYTES, OpenSession
from schema.fleet.kinds import TASK, Offer, Wanted, clauses
from schema.moves.reassign import require_tasks
from schema.moves.waiting.requeue import requeue
from tests.support.explain import explained, gates_of
from tests.support.pool import Bot, Pool, completed
from tests.support.race import Race, cancel, outcome

SHOP = {"app": "shop"}


def bot_of(pool: Pool, name: str, *tasks: str, **fields: Any) -> Bot:
    """A bot of the app that has imported these tasks."""
    return pool.bot(name, properties=SHOP, exclusive=["app"], tasks=sorted(tasks), **fields)


def call(pool: Pool, task: str, **fields: Any) -> str:
    (job,) = pool.submit(properties=SHOP, payload={"command": ["leasehold-task", "shop:pool", task]}, **fields)
    return job


def refuse(pool: Pool, bot: Bot) -> None:
    """The bot gives back all that it is given, because it has not imported the task."""
    work = pool.given(bot)
    assert work
    bot.sync(*(completed(each, "released", reason="not imported", unknown_task=True) for each in work))


def row(pool: Pool, job: str) -> tuple[str, int, int]:
    found = pool.row("SELECT state, attempts, kills FROM jobs WHERE public_id = CAST(:id AS uuid)", id=job)
    return found.state, found.attempts, found.kills


def given_jobs(pool: Pool, bot: Bot) -> list[str]:
    return [work["job"] for work in pool.given(bot)]


def test_a_call_that_a_bot_does_not_know_goes_to_one_that_does_and_is_not_charged(pool: Pool) -> None:
    old = bot_of(pool, "old", "shop.add")
    job = call(pool, "shop.ship", max_attempts=1)
    refuse(pool, old)
    assert row(pool, job) == ("queued", 0, 0)
    assert given_jobs(pool, old) == []
    new = bot_of(pool, "new", "shop.add", "shop.ship")
    assert given_jobs(pool, new) == [job]
    assert given_jobs(pool, old) == []


def test_while_only_bots_without_the_task_are_there_it_waits_and_explain_says_why(pool: Pool) -> None:
    old = bot_of(pool, "old", "shop.add", capacity=2)
    job, other = call(pool, "shop.ship"), call(pool, "shop.add")
    work = {each["job"]: each for each in pool.given(old)}
    old.sync(completed(work[job], "released", unknown_task=True), completed(work[other]))
    gate = gates_of(explained(pool, job))["requirements"]
    assert gate.sentence == ("no bot has imported the task 'shop.ship'; 1 bot of cohort 'default' with all the rest")
    assert not gate.open
    # Nothing stands in the way of other calls.
    later = call(pool, "shop.add")
    assert given_jobs(pool, old) == [later]


@pytest.mark.parametrize("fetches", [True, False])
def test_the_bot_that_gives_a_call_back_does_not_fetch_it_at_once(pool: Pool, fetches: bool) -> None:
    old = bot_of(pool, "old", "shop.add", sync_service=pool.sync_service(enabled=fetches, to_capacity=fetches))
    job = call(pool, "shop.ship")
    (work,) = pool.given(old)
    answer = old.sync(completed(work, "released", unknown_task=True))
    assert answer["leases"] == []
    assert row(pool, job) == ("queued", 0, 0)


def test_bots_that_do_not_tell_their_tasks_are_given_every_call(pool: Pool) -> None:
    old = bot_of(pool, "old", "shop.add")
    job = call(pool, "shop.ship")
    refuse(pool, old)
    silent = pool.bot("silent", properties=SHOP)
    assert given_jobs(pool, silent) == [job]


def test_what_a_call_asks_for_otherwise_stays(pool: Pool) -> None:
    old = bot_of(pool, "old", "shop.add")
    job = call(pool, "shop.ship", preferred_properties={"region": ["eu"]})
    refuse(pool, old)
    found = pool.row(
        "SELECT p.properties AS required, f.properties AS preferred FROM jobs j JOIN platforms p ON p.id = j.platform"
        " JOIN platforms f ON f.id = j.preferred WHERE public_id = CAST(:id AS uuid)",
        id=job,
    )
    task = {TASK: ["shop.ship"]}
    assert found.required == {"app": ["shop"], **task}
    assert found.preferred == {"app": ["shop"], "region": ["eu"], **task}
    assert given_jobs(pool, bot_of(pool, "new", "shop.ship")) == [job]


def test_a_bot_that_tells_more_bytes_of_names_than_it_may_is_refused() -> None:
    def told(count: int) -> OpenSession:
        # With quotation marks, comma and space, 160 bytes each.
        return OpenSession(bot="b", secret="s" * 32, tasks=[f"{number:0156}" for number in range(count)])

    assert told(MAX_TASKS_BYTES // 160).tasks
    with pytest.raises(ValidationError, match="is longer than 131072 bytes as JSON"):
        told(MAX_TASKS_BYTES // 160 + 1)


def test_bots_that_tell_the_same_tasks_are_of_one_kind_and_their_list_is_not_among_what_they_show(pool: Pool) -> None:
    for name in ("one", "two"):
        bot_of(pool, name, *(f"shop.task_{number}" for number in range(300)))
    assert pool.row("SELECT count(DISTINCT kind) AS n FROM bots").n == 1
    shown = pool.database.run(lambda connection: jobs.bots(connection, after="", limit=10))
    assert [bot["properties"] for bot in shown] == [{"app": ["shop"]}] * 2


@pytest.mark.parametrize("insists", [{}, {"prefer_seconds": 60}])
def test_a_call_given_back_insists_and_a_requeued_one_asks_as_submitted(pool: Pool, insists: dict[str, int]) -> None:
    eu = {"properties": {**SHOP, "region": "eu"}, "exclusive": ["app"]}
    old = pool.bot("old", tasks=["shop.add"], **eu)
    job = call(pool, "shop.ship", preferred_properties={"region": ["eu"]}, **insists)
    refuse(pool, old)
    if insists:
        assert given_jobs(pool, bot_of(pool, "elsewhere", "shop.ship")) == []
    new = pool.bot("new", tasks=["shop.ship"], **eu)
    (work,) = pool.given(new)
    assert work["job"] == job
    new.sync(completed(work, "released"), status="gone")
    cancel(pool, job)
    (requeued,) = pool.database.run(
        lambda c: requeue(c, [job], instances=None, ceiling=None, key=None, reason=None, actor="test")
    )
    assert given_jobs(pool, old) == [requeued.successor]


def test_transactions_that_give_back_the_same_calls_in_another_order_do_not_wait_for_each_other(race: Race) -> None:
    pool = race.pool

    def calls(*places: str) -> list[int]:
        found = []
        for place in places:
            (job,) = pool.submit(
                properties={**SHOP, "place": place}, payload={"command": ["leasehold-task", "shop:pool", "shop.ship"]}
            )
            found.append(pool.job(job).id)
        return found

    calls("a", "b", "c")
    one, other = calls("b", "c", "a"), calls("a", "b")
    (last,) = calls("c")
    with race.first() as ahead:
        ahead.database.run(lambda c: require_tasks(c, [last], longest=MAX_TASK))
        first = race.second(lambda: pool.database.run(lambda c: require_tasks(c, one, longest=MAX_TASK)), behind=ahead)
        second = race.as_far_as_it_goes(
            lambda: pool.database.run(lambda c: require_tasks(c, other, longest=MAX_TASK)), behind=1
        )
        ahead.roll_back()
        outcome(first)
        outcome(second)
    assert race.errors == []
    assert pool.row("SELECT count(*) AS n FROM platforms WHERE properties ? 'leasehold.task'").n == 3


def test_assigners_judge_offers_of_tasks_as_the_database_does(pool: Pool) -> None:
    cases: list[tuple[Any, Any, bool]] = [
        ({"app": ["a"], TASK: ["x", "y"]}, {"app": ["a"], TASK: ["x"]}, True),
        ({"app": ["a"], TASK: ["y"]}, {"app": ["a"], TASK: ["x"]}, False),
        ({"app": ["a"], TASK: ["y"]}, {"app": ["a"]}, True),
        ({"app": ["a"]}, {"app": ["a"], TASK: ["x"]}, True),
        ({"app": ["b"]}, {"app": ["a"], TASK: ["x"]}, False),
    ]
    judged = "SELECT is_open_to(CAST(:offered AS jsonb), '{}', CAST(:asked AS jsonb)) AS yes"
    for offered, asked, is_open in cases:
        assert Offer(clauses(offered)).is_open_to(Wanted(clauses(asked))) is is_open
        assert pool.row(judged, offered=json.dumps(offered), asked=json.dumps(asked)).yes is is_open
