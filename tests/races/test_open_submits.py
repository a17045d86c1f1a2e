"""A submit in a transaction that stays open holds up nobody who asks for something else."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from schema.moves.submit import Submitted, submit
from schema.postgres.statements import Statement
from tests.support.pool import Pool, completed
from tests.support.race import Race, outcome

LINUX, PLAN9 = {"os": "linux"}, {"os": "plan9"}
ADVISORY = """
SELECT count(*) AS n FROM pg_locks WHERE locktype = 'advisory' AND pid = :pid"""
#: What is new in a submit: a deduplication key, and each row that submits share.
NEW: dict[str, Callable[[int], dict[str, Any]]] = {
    "deduplication key": lambda n: {"dedup_key": f"key-{n}"},
    "key": lambda n: {"key": f"key-{n}"},
    "instance": lambda n: {"instance": f"instance-{n}"},
    "requirement set": lambda n: {"properties": {"os": f"os-{n}"}},
    "preferred properties": lambda n: {"preferred_properties": {"os": [f"os-{n}"]}},
    "constraint set": lambda n: {"terms": {"locks": [f"lock-{n}"]}},
    "queue": lambda n: {"units": n + 1},
}


def together(pool: Pool, *jobs: dict[str, Any]) -> list[Submitted]:
    requests = [{"instance": "default", "properties": {}, "payload": {"command": ["true"]}, **job} for job in jobs]
    return pool.database.run(lambda c: submit(c, requests, actor="test"))


@pytest.mark.parametrize("what", NEW)
def test_many_new_ones_do_not_wait_for_another_not_committed(pool: Pool, race: Race, what: str) -> None:
    pool.submit()
    fields = NEW[what]
    with race.first() as first:
        first.submit(**fields(0))
        first.submit(2, **fields(0))

        def strangers() -> int:
            for n in range(1, 4):
                pool.submit(**fields(n))
            return len(together(pool, *(fields(n) for n in range(4, 61))))

        assert race.unhindered(strangers, by=first) == 57
        first.commit()
    assert race.errors == []


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("what", sorted({*NEW} - {"key", "deduplication key"}))
def test_an_equal_new_one_waits_and_is_made_once(pool: Pool, race: Race, what: str, commit: bool) -> None:
    mine = race.in_turn(
        lambda first: first.submit(**NEW[what](1)), lambda: pool.submit(2, **NEW[what](1)), commit=commit
    )
    queues = {row.queue for row in pool.rows("SELECT queue FROM jobs")}
    assert (len(mine), len(queues)) == (2, 1)


@pytest.mark.parametrize("what", ["instance", "requirement set", "deduplication key"])
def test_an_equal_new_one_gives_up_after_the_lock_time_out_of_its_session(pool: Pool, race: Race, what: str) -> None:
    pool.submit()
    with race.first() as first:
        first.submit(**NEW[what](1))
        request = json.dumps([{"command": ["true"], **NEW[what](1)}])
        with pool.database.listen() as caller:
            caller.execute("SET lock_timeout = '50ms'")
            with pytest.raises(Exception, match="lock timeout"):
                caller.execute("SELECT leasehold.submit(%s)", (request,))
            assert caller.execute(
                "SELECT count(*) FROM leasehold.submit(%s)", (json.dumps([{"command": ["true"]}]),)
            ).fetchone() == (1,)


def test_many_deduplication_keys_take_no_advisory_locks(pool: Pool, race: Race) -> None:
    with race.first() as first:
        together(first, *({"dedup_key": f"key-{n}"} for n in range(300)))
        assert first.connection.execute(Statement(ADVISORY), {"pid": first.pid}).scalar_one() == 0


def test_sessions_open_and_upkeep_goes_on_while_a_requirement_set_is_undecided(pool: Pool, race: Race) -> None:
    upkeep = pool.upkeep()
    pool.submit(units=9)
    with race.first() as first:
        first.submit(properties=LINUX)
        race.unhindered(lambda: pool.bot(properties=LINUX), by=first)
        race.unhindered(lambda: pool.submit(properties=PLAN9), by=first)
        race.unhindered(upkeep.run_once, by=first)
        first.commit()
    assigner = pool.assigner()
    assigner.run_once()
    assert [row.state for row in pool.rows("SELECT state FROM jobs ORDER BY id")] == ["queued"] * 3
    assert pool.rows("SELECT FROM queues WHERE schedule_after > now()"), "it rests, because no bot seems to take it"
    upkeep.run_once()
    assigner.run_once()
    assert [row.state for row in pool.rows("SELECT state FROM jobs ORDER BY id")] == ["queued", "leased", "queued"]
    assert pool.rows("SELECT FROM platforms WHERE NOT linked") == []


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_upkeep_links_a_set_with_a_kind_that_its_transaction_did_not_see(
    pool: Pool, race: Race, isolation: Any
) -> None:
    with race.first(isolation=isolation) as first:
        first.rows("SELECT 1")
        first.submit(properties=LINUX)
        pool.bot(properties=LINUX)
        first.commit()
    pool.upkeep().run_once()
    pool.assigner().run_once()
    assert [row.state for row in pool.rows("SELECT state FROM jobs")] == ["leased"]


def test_upkeep_does_not_judge_a_set_while_a_session_opens_and_comes_again(pool: Pool, race: Race) -> None:
    pool.submit(properties=LINUX)
    upkeep = pool.upkeep()
    with race.first() as first:
        first.bot(properties=LINUX)
        race.unhindered(upkeep.run_once, by=first)
        assert len(pool.rows("SELECT FROM platforms WHERE NOT linked")) == 1
        first.commit()
    upkeep.run_once()
    assert pool.rows("SELECT FROM platforms WHERE NOT linked") == []
    assert len(pool.rows("SELECT FROM kind_platforms")) == 1


def test_upkeep_links_a_few_sets_in_each_round_and_goes_on(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction links two sets, and a round has two transactions."""
    together(pool, *({"properties": {"os": f"os-{n}"}} for n in range(5)))
    monkeypatch.setattr("assigner.maintenance.upkeep.LINKS", 2)
    monkeypatch.setattr("assigner.maintenance.upkeep.DELETIONS", 2)
    upkeep = pool.upkeep()
    for left in (1, 0):
        upkeep.run_once()
        assert len(pool.rows("SELECT FROM platforms WHERE NOT linked")) == left


def test_a_label_that_is_full_but_for_what_is_not_committed_takes_more_at_once(pool: Pool, race: Race) -> None:
    pool.change("INSERT INTO queue_limits (label, max_queued) VALUES ('nightly', 1)")
    pool.submit()
    with race.first() as first:
        first.submit(label="nightly")
        race.unhindered(lambda: pool.submit(label="nightly"), by=first)
        first.commit()
    assert len(pool.rows("SELECT FROM jobs WHERE label = 'nightly'")) == 2


def test_three_submits_of_one_deduplication_key_at_once_share_its_job(pool: Pool, race: Race) -> None:
    """The third meets the job when the second holds it, and starts again rather than wait with locks in hand."""
    with race.first() as first:
        mine = first.submit(dedup_key="b")
        second = race.second(lambda: together(pool, {"dedup_key": "a"}, {"dedup_key": "b"}), behind=first)
        third = race.second(lambda: together(pool, {"dedup_key": "b"}, {"dedup_key": "c"}), behind=first)
        first.commit()
        joined = [outcome(second)[1], outcome(third)[0]]
    assert [each.created for each in joined] == [False, False]
    assert [str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE dedup_key = 'b'")] == mine
    assert len(pool.rows("SELECT FROM jobs")) == 3
    assert race.errors == []


def test_the_ends_of_other_jobs_do_not_wait_for_a_running_job_that_is_being_joined(pool: Pool, race: Race) -> None:
    _, bot, work = pool.running(dedup_key="a")
    other = pool.bot("bot-2", properties=LINUX)
    pool.submit(properties=LINUX)
    pool.assigner().run_once()
    (its,) = other.take()
    with race.first() as first:
        first.submit(dedup_key="a")
        race.unhindered(lambda: other.sync(completed(its)), by=first)
        late = race.second(lambda: bot.sync(completed(work)), behind=first)
        first.commit()
        outcome(late)
