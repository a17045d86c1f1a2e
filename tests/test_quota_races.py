"""Quotas, two at once on one counter: who waits, who wins, and the order in which they are locked."""

from typing import Any

import pytest
from sqlalchemy import Connection

from schema import ledger, moves, quotas
from tests.pool import Pool, active, completed
from tests.racing import Race, at_desk_of, outcome
from tests.tenancy import Tenancy, assign, contested

WRITERS = """
SELECT count(*) AS writers FROM pg_locks
WHERE relation = CAST('leases' AS regclass) AND mode = 'RowExclusiveLock' AND granted"""
LOCK_QUOTA = """
SELECT FROM quotas q JOIN instances i ON i.id = q.instance WHERE i.name = :instance FOR NO KEY UPDATE OF q"""


# --- grant × quota


@pytest.mark.parametrize("commit", [True, False])
def test_a_34_two_assigners_never_share_the_last_unit_of_a_maximum(
    pool: Pool, tenancy: Tenancy, race: Race, commit: bool
) -> None:
    tenancy.quota("team-a", maximum=1)
    for kind in ("one", "two"):
        pool.bot(f"bot-{kind}", properties={"kind": kind})
        pool.submit(instance="team-a", properties={"kind": kind})
    race.in_turn(
        lambda first: first.assigner(batch=1).run_once(), lambda: pool.assigner(batch=1).run_once(), commit=commit
    )
    assert tenancy.usage("team-a") == 1


@pytest.mark.parametrize(("commit", "usage"), [(True, 0), (False, 1)])
def test_grant_quota_lowered_a_grant_waits_and_obeys(
    pool: Pool, tenancy: Tenancy, race: Race, commit: bool, usage: int
) -> None:
    tenancy.quota("team-a", maximum=2)
    pool.bot()
    pool.submit(instance="team-a")
    race.in_turn(Tenancy.quota("team-a", maximum=0), lambda: pool.assigner().run_once(), commit=commit)
    assert tenancy.usage("team-a") == usage


def test_grant_quota_lowered_what_was_granted_before_stays_and_nothing_new_starts(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    tenancy.quota("team-a", maximum=2)
    bot = pool.bot(capacity=4)
    pool.submit(3, instance="team-a")
    race.in_turn(lambda first: first.assigner().run_once(), lambda: tenancy.quota("team-a", maximum=1))
    works = bot.take()
    pool.assigner().run_once()
    assert (tenancy.usage("team-a"), len(works)) == (2, 2), "nothing is stopped"
    answer = bot.sync(completed(works[0]), active(works[1]))
    assert len(answer["leases"]) == 1, "its maximum is used up"
    assert bot.sync(completed(works[1]))["leases"], "and now there is one again"
    assert tenancy.usage("team-a") == 1


def test_the_first_quota_of_an_instance_counts_grants_that_were_not_decided_yet(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    pool.bot(capacity=2)
    pool.submit(3, instance="team-a")
    race.in_turn(lambda first: first.assigner(batch=1).run_once(), lambda: tenancy.quota("team-a", maximum=2))
    assert tenancy.usage("team-a") == 1


def test_the_first_quota_of_an_instance_counts_ends_that_were_not_decided_yet(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    pool.submit(instance="team-a")
    bot = pool.bot()
    pool.assigner().run_once()
    (work,) = bot.take()
    race.in_turn(lambda first: at_desk_of(first, bot).sync(completed(work)), lambda: tenancy.quota("team-a", maximum=2))
    assert tenancy.usage("team-a") == 0


def test_a_grant_that_meets_the_first_quota_of_its_instance_waits_and_is_counted(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    pool.bot(capacity=3)
    pool.submit(3, instance="team-a")
    race.in_turn(Tenancy.quota("team-a", maximum=1), lambda: pool.assigner().run_once())
    assert tenancy.usage("team-a") == 1


@pytest.mark.parametrize("commit", [True, False])
def test_a_quota_that_is_removed_while_granting_leaves_nothing_uncounted(
    pool: Pool, tenancy: Tenancy, race: Race, commit: bool
) -> None:
    tenancy.quota("team-a", maximum=1)
    pool.bot(capacity=3)
    pool.submit(2, instance="team-a")
    race.in_turn(
        lambda first: first.database.run(lambda c: quotas.remove_quota(c, "default", "team-a", actor="test")),
        lambda: pool.assigner().run_once(),
        commit=commit,
    )
    pool.assigner().run_once()
    assert tenancy.running() == {"team-a": 2 if commit else 1}


def test_bg_26_a_fetch_does_not_wait_for_a_quota_that_an_assigner_holds(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    _, bot, work = pool.running(instance="team-b")
    tenancy.quota("team-a", maximum=10)
    pool.bot("bot-2", properties={"kind": "two"})
    pool.submit(instance="team-a", properties={"kind": "two"})
    (other,) = pool.submit(instance="team-a")
    answer = race.side_by_side(lambda first: first.assigner().run_once(), lambda: bot.sync(completed(work)))
    assert answer["leases"] == [], "it counts as used up"
    assert tenancy.usage("team-a") == 1
    pool.assigner().run_once()
    assert pool.job(other).state == "leased"


# --- the lock order


def test_a_27_an_eviction_after_a_grant_takes_no_quota_out_of_order(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    contested(pool, tenancy, properties={"kind": "one"})
    tenancy.quota("team-z", maximum=5)
    pool.bot("bot-2", properties={"kind": "two"})
    pool.submit(instance="team-z", properties={"kind": "two"})
    race.side_by_side(lambda first: first.change(LOCK_QUOTA, instance="team-b"), lambda: assign(pool), commit=False)
    assert (tenancy.usage("team-z"), tenancy.asked()) == (1, 0)
    assign(pool)
    assert tenancy.asked() == 1


def test_a_27_after_an_eviction_that_came_to_nothing_no_quota_is_taken_out_of_order(
    pool: Pool, tenancy: Tenancy, race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, wanting, victim in (("one", "team-a", "team-b"), ("two", "team-c", "team-d")):
        tenancy.quota(victim, maximum=3)
        pool.submit(instance=victim, priority=10, properties={"kind": kind})
        bot = pool.bot(f"bot-{kind}", properties={"kind": kind})
        pool.assigner().run_once()
        bot.take()
        tenancy.quota(wanting, minimum=1)
        pool.submit(instance=wanting, properties={"kind": kind}, priority=int(kind == "two"))
    preempt, tried = moves.preempt, []

    def after_a_change(connection: Connection, **fields: Any) -> bool:
        if not tried:
            tenancy.quota("team-a", minimum=0)
        tried.append(preempt(connection, **fields))
        return tried[-1]

    monkeypatch.setattr(moves, "preempt", after_a_change)
    race.side_by_side(lambda first: first.change(LOCK_QUOTA, instance="team-d"), lambda: assign(pool), commit=False)
    assert (tried, tenancy.asked()) == ([False, False], 0)


def test_a_27_a_bot_that_finishes_and_leaves_at_once_takes_its_quotas_in_order(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    for team in ("team-a", "team-b"):
        tenancy.quota(team, maximum=5)
        pool.submit(instance=team)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    works = {work["instance"]: work for work in bot.take()}
    with race.first() as first:
        first.change(LOCK_QUOTA, instance="team-a")
        late = race.second(lambda: bot.sync(completed(works["team-b"]), status="gone"), behind=first)
        pool.change(LOCK_QUOTA + " NOWAIT", instance="team-b")
        first.roll_back()
        outcome(late)

    assert (tenancy.usage("team-a"), tenancy.usage("team-b")) == (0, 0)
    assert pool.job(works["team-b"]["job"]).state == "succeeded"
    released = pool.job(works["team-a"]["job"])
    assert (released.state, released.attempts) == ("queued", 0)


def test_a_27_an_eviction_that_waits_for_a_quota_has_said_that_it_will_write_leases(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    """Or those who repair counters, alone with the leases, would wait for its quota while it waits for the leases."""
    contested(pool, tenancy)
    with race.first() as first:
        first.change(LOCK_QUOTA, instance="team-b")
        late = race.second(lambda: assign(pool), behind=first)
        assert pool.row(WRITERS).writers == 1
        first.roll_back()
        outcome(late)

    assert tenancy.asked() == 1


def test_a_27_counters_are_repaired_after_the_evictions_that_hold_them(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    contested(pool, tenancy)
    pool.change("UPDATE quotas SET usage = usage + 1 WHERE usage = 1")
    assert [drift.instance for drift in race.in_turn(assign, lambda: pool.database.run(ledger.reconcile))] == ["team-b"]
    assert tenancy.usage("team-b") == 1
