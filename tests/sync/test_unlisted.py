"""Leases that a bot holds in advance and leaves out of its reports, because nothing has changed for them."""

from typing import Any

import pytest

from schema.moves.cancel import cancel
from tests.support.pool import Bot, Pool, active, completed

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
def test_a_lease_that_is_not_listed_and_has_to_stop_is_told_and_ends_only_when_the_bot_says_so(
    pool: Pool, beside: bool
) -> None:
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


def test_a_bot_that_does_not_hold_what_the_database_says_is_told_everything(pool: Pool) -> None:
    bot, works = waiting(pool, enabled=False)
    answer = bot.sync(completed(works[0]), unlisted=2)
    assert (set(jobs(answer)), answer.get("unlisted")) == ({work["job"] for work in works[1:]}, None)
    assert all(lease["payload"] for lease in answer["leases"])


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


def test_a_call_after_one_that_the_database_does_not_know_is_told_everything(pool: Pool) -> None:
    bot, works = waiting(pool, enabled=False)
    bot.seq += 1
    answer = bot.sync(completed(works[0]), unlisted=3)
    assert (set(jobs(answer)), answer.get("unlisted")) == ({work["job"] for work in works[1:]}, None)
    assert states(pool, works) == ["succeeded"] + ["leased"] * 3


def test_a_repeated_call_is_told_everything(pool: Pool) -> None:
    bot, works = waiting(pool, enabled=False)
    bot.sync(completed(works[0]), unlisted=3)
    bot.seq -= 1
    answer = bot.sync(completed(works[0]), unlisted=3)
    assert (set(jobs(answer)), answer.get("unlisted")) == ({work["job"] for work in works[1:]}, None)


def test_a_bot_that_leaves_gives_back_what_it_does_not_list(pool: Pool) -> None:
    bot, works = waiting(pool, enabled=False)
    bot.sync(completed(works[0]), unlisted=3, status="gone")
    assert states(pool, works) == ["succeeded"] + ["queued"] * 3


def test_a_call_of_a_bot_that_lists_nothing_but_holds_something_is_not_held_back(pool: Pool) -> None:
    bot, _ = waiting(pool, enabled=False)
    assert bot.sync(unlisted=4, wait=10.0)["unlisted"] == 4
