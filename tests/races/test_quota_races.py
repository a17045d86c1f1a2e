"""Quotas, two at once on one counter: who waits, who wins, and the order in which they are locked."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
from leasehold.errors import Conflict, NotFound
from structlog.testing import capture_logs

from assigner.cycle.assigner import PriorityAgeAssigner
from assigner.cycle.pacing import CAREFUL, LOOK_INTERVAL, ConflictBackoff
from assigner.cycle.settings import AssignerSettings
from schema import clock
from schema.accounting import quotas
from schema.accounting.held_rows import HeldRows
from schema.accounting.quotas import QuotaChange
from schema.moves import preempt as preempt_moves
from schema.postgres.connection import Connection
from schema.postgres.engine import Database, DatabaseSettings
from schema.postgres.statements import Statement
from tests.support.patience import MINUTE
from tests.support.pool import Pool, active, completed
from tests.support.race import Race, at_service_of, cancel, outcome
from tests.support.tenancy import Tenancy, assign, cohort_of, contested, put_cohort, remove_cohort, share, used

WRITERS = """
SELECT count(*) AS writers FROM pg_locks
WHERE relation = CAST('leases' AS regclass) AND mode = 'RowExclusiveLock' AND granted"""
LOCK_QUOTA = """
SELECT FROM quotas q JOIN instances i ON i.id = q.instance WHERE i.name = :instance FOR NO KEY UPDATE OF q"""


# --- grant × quota


@pytest.mark.parametrize("commit", [True, False])
def test_two_assigners_never_share_the_last_unit(pool: Pool, tenancy: Tenancy, race: Race, commit: bool) -> None:
    tenancy.quota("team-a", maximum=1)
    for kind in ("one", "two"):
        pool.bot(f"bot-{kind}", properties={"kind": kind})
        pool.submit(instance="team-a", properties={"kind": kind})
    race.in_turn(
        lambda first: first.assigner(batch=1).run_once(), lambda: pool.assigner(batch=1).run_once(), commit=commit
    )
    assert tenancy.usage("team-a") == 1


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize(
    ("before", "after", "started"),
    [(2, 0, (0, 2)), (None, 1, (1, 3)), (1, None, (3, 1))],
    ids=["lowered", "the first of its instance", "removed"],
)
def test_a_grant_waits_for_a_change_of_its_quota_and_obeys(
    pool: Pool,
    tenancy: Tenancy,
    race: Race,
    before: int | None,
    after: int | None,
    started: tuple[int, int],
    commit: bool,
) -> None:
    if before is not None:
        tenancy.quota("team-a", maximum=before)
    pool.bot(capacity=3)
    pool.submit(3, instance="team-a")

    def change(first: Pool) -> None:
        if after is None:
            first.database.run(lambda c: quotas.remove_quotas(c, [("default", "team-a")], actor="test"))
        else:
            Tenancy(first).quota("team-a", maximum=after)

    race.in_turn(change, lambda: pool.assigner().run_once(), commit=commit)
    pool.assigner().run_once()
    assert tenancy.running().get("team-a", 0) == started[not commit]


def test_a_lowered_quota_keeps_what_was_granted_before_and_starts_nothing(
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


@pytest.mark.parametrize("ends", [True, False])
def test_the_first_quota_of_an_instance_counts_grants_and_ends_that_were_not_decided_yet(
    pool: Pool, tenancy: Tenancy, race: Race, ends: bool
) -> None:
    bot = pool.bot(capacity=2, sync_service=pool.sync_service(enabled=False))
    pool.submit(3, instance="team-a")
    works = pool.given(bot) if ends else []
    pool.submit(instance="team-b", priority=-1)

    def first(ahead: Pool) -> object:
        if ends:
            return at_service_of(ahead, bot).sync(completed(works[0]), active(works[1]))
        return ahead.assigner().run_once()

    race.in_turn(first, lambda: tenancy.quota("team-a", maximum=2))
    assert tenancy.usage("team-a") == 1


def test_a_fetch_does_not_wait_for_a_quota_that_an_assigner_holds(pool: Pool, tenancy: Tenancy, race: Race) -> None:
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


# --- units that a call returns and takes again


def test_a_call_that_ends_one_job_and_fetches_another_of_its_instance_needs_no_lock_on_the_quota(
    pool: Pool, tenancy: Tenancy, race: Race
) -> None:
    tenancy.quota("team-a", maximum=10)
    pool.submit(2, instance="team-a")
    bot = pool.bot()
    (work,) = pool.given(bot)
    with race.first() as first:
        first.change(LOCK_QUOTA, instance="team-a")
        (fetched,) = race.unhindered(lambda: bot.sync(completed(work)), by=first)["leases"]
    assert tenancy.usage("team-a") == 1
    bot.sync(completed(fetched))
    assert tenancy.usage("team-a") == 0


@pytest.mark.parametrize("commit", [True, False])
def test_a_call_that_only_returns_units_waits_at_its_end(
    pool: Pool, tenancy: Tenancy, race: Race, commit: bool
) -> None:
    tenancy.quota("team-a", maximum=10)
    pool.submit(instance="team-a")
    bot = pool.bot()
    (work,) = pool.given(bot)
    race.in_turn(
        lambda first: first.change(LOCK_QUOTA, instance="team-a"), lambda: bot.sync(completed(work)), commit=commit
    )
    assert tenancy.usage("team-a") == 0


@pytest.mark.parametrize(("limits", "other"), [({"maximum": 1}, 10), ({"minimum": 1, "maximum": 10}, -10)])
def test_a_call_near_a_maximum_or_at_a_minimum_returns_its_units_before_it_looks_for_a_job(
    pool: Pool, tenancy: Tenancy, race: Race, limits: dict[str, int], other: int
) -> None:
    tenancy.quota("team-a", **limits)
    mine = pool.submit(2, instance="team-a")
    bot = pool.bot()
    (work,) = pool.given(bot)
    pool.submit(instance="team-b", priority=other)
    (fetched,) = race.in_turn(
        lambda first: first.change(LOCK_QUOTA, instance="team-a"), lambda: bot.sync(completed(work))
    )["leases"]
    assert {work["job"], fetched["job"]} == set(mine)
    assert tenancy.usage("team-a") == 1


def test_calls_that_return_units_of_a_minimum_at_once_see_each_other(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    tenancy.quota("team-a", minimum=2, maximum=10)
    mine = pool.submit(6, instance="team-a")
    first_bot, second_bot = pool.bot("bot-1", capacity=2), pool.bot("bot-2", capacity=2)
    pool.assigner().run_once()
    works, others = first_bot.take(), second_bot.take()
    pool.submit(4, instance="team-b", priority=-10)
    answer = race.in_turn(
        lambda first: at_service_of(first, first_bot).sync(*map(completed, works)),
        lambda: second_bot.sync(*map(completed, others)),
    )
    assert {work["job"] for work in answer["leases"]} <= set(mine), "its minimum was not met when the call looked"
    assert tenancy.usage("team-a") == 2


def test_a_call_that_fetches_for_another_instance_first_returns_units(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    for team in ("team-a", "team-b"):
        tenancy.quota(team, maximum=10)
    pool.submit(instance="team-a")
    bot = pool.bot()
    (work,) = pool.given(bot)
    pool.submit(instance="team-b")
    race.in_turn(lambda first: first.change(LOCK_QUOTA, instance="team-a"), lambda: bot.sync(completed(work)))
    assert (tenancy.usage("team-a"), tenancy.usage("team-b")) == (0, 1)


# --- the lock order


def test_an_eviction_after_a_grant_takes_no_quota_out_of_order(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    contested(pool, tenancy, properties={"kind": "one"})
    tenancy.quota("team-z", maximum=5)
    pool.bot("bot-2", properties={"kind": "two"})
    pool.submit(instance="team-z", properties={"kind": "two"})
    race.side_by_side(lambda first: first.change(LOCK_QUOTA, instance="team-b"), lambda: assign(pool), commit=False)
    assert (tenancy.usage("team-z"), tenancy.stop_requests()) == (1, 0)
    assign(pool)
    assert tenancy.stop_requests() == 1


def test_after_an_eviction_that_came_to_nothing_no_quota_is_taken_out_of_order(
    pool: Pool, tenancy: Tenancy, race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, wanting, victim in (("one", "team-a", "team-b"), ("two", "team-c", "team-d")):
        tenancy.quota(victim, maximum=3)
        pool.submit(instance=victim, priority=10, properties={"kind": kind})
        bot = pool.bot(f"bot-{kind}", properties={"kind": kind})
        pool.given(bot)
        tenancy.quota(wanting, minimum=1)
        pool.submit(instance=wanting, properties={"kind": kind}, priority=int(kind == "two"))
    preempt, tried = preempt_moves.preempt, []

    def after_a_change(connection: Connection, **fields: Any) -> bool:
        if not tried:
            tenancy.quota("team-a", minimum=0)
        tried.append(preempt(connection, **fields))
        return tried[-1]

    monkeypatch.setattr("assigner.preemption.reclaim.preempt", after_a_change)
    race.side_by_side(lambda first: first.change(LOCK_QUOTA, instance="team-d"), lambda: assign(pool), commit=False)
    assert (tried, tenancy.stop_requests()) == ([False, False], 0)


def test_a_bot_that_finishes_and_leaves_takes_its_quotas_in_order(pool: Pool, tenancy: Tenancy, race: Race) -> None:
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


def test_an_eviction_that_waits_for_a_quota_may_already_write_leases(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    """Or those who repair counters, alone with the leases, would wait for its quota while it waits for the leases."""
    contested(pool, tenancy)
    with race.first() as first:
        first.change(LOCK_QUOTA, instance="team-b")
        late = race.second(lambda: assign(pool), behind=first)
        assert pool.row(WRITERS).writers == 1
        first.roll_back()
        outcome(late)
    assert tenancy.stop_requests() == 1


def test_counters_are_repaired_after_the_evictions_that_hold_them(pool: Pool, tenancy: Tenancy, race: Race) -> None:
    contested(pool, tenancy)
    pool.change("UPDATE quotas SET usage = usage + 1 WHERE usage = 1")
    assert [drift.instance for drift in race.in_turn(assign, lambda: pool.database.run(quotas.reconcile_quotas))] == [
        "team-b"
    ]
    assert tenancy.usage("team-b") == 1


# Cohorts and quotas that change while the pool is at work: whoever is second waits, and nobody deadlocks.


def leases(pool: Pool) -> list[tuple[str, str, str]]:
    """The cohorts of each live lease, its job and its bot."""
    rows = pool.rows(
        "SELECT l.cohort AS lease, j.cohort AS job, b.cohort AS bot FROM live l"
        " JOIN jobs j ON j.id = l.job_id JOIN bots b ON b.id = l.bot_id"
    )
    return [tuple(row) for row in rows]


def test_a_cohort_declared_behind_an_assigner_leaves_what_it_has_placed(pool: Pool, race: Race) -> None:
    pool.submit(2, label="gpu")
    pool.bot()
    race.in_turn(lambda first: first.assigner().run_once(), lambda: put_cohort(pool, "gpus", "gpu"))
    assert leases(pool) == [(0, 0, 0)]
    assert (
        pool.row("SELECT c.name FROM jobs j JOIN cohorts c ON c.id = j.cohort WHERE j.state = 'queued'").name == "gpus"
    )


def test_an_assigner_behind_a_cohort_that_is_declared_places_nothing_across_cohorts(pool: Pool, race: Race) -> None:
    pool.submit(label="gpu")
    pool.bot()
    race.in_turn(lambda first: put_cohort(first, "gpus", "gpu"), lambda: pool.assigner().run_once())
    assert leases(pool) == []
    pool.bot("bot-2", labels=["gpu"])
    pool.assigner().run_once()
    ((lease, job, bot),) = leases(pool)
    assert lease == job == bot != 0


@pytest.mark.parametrize("declares_first", [True, False])
def test_a_cancel_and_a_new_cohort_do_not_undo_each_other(pool: Pool, race: Race, declares_first: bool) -> None:
    (job,) = pool.submit(label="gpu")
    pool.submit(label="gpu")

    def declare(at: Pool) -> Any:
        put_cohort(at, "gpus", "gpu")

    def give_up(at: Pool) -> Any:
        cancel(at, job)

    ahead, behind = (declare, give_up) if declares_first else (give_up, declare)
    race.in_turn(ahead, lambda: behind(pool))
    assert pool.job(job).state == "cancelled"
    assert (
        pool.row("SELECT c.name FROM jobs j JOIN cohorts c ON c.id = j.cohort WHERE j.state = 'queued'").name == "gpus"
    )


@pytest.mark.parametrize("declares_first", [True, False])
def test_a_job_that_comes_back_while_a_cohort_is_declared_gets_it(pool: Pool, race: Race, declares_first: bool) -> None:
    pool.submit(label="gpu")
    bot = pool.bot(labels=["gpu"])
    (work,) = pool.given(bot)
    with race.first() as first:
        if declares_first:
            put_cohort(first, "gpus", "gpu")
            waiting = race.second(lambda: bot.sync(completed(work, "released")), behind=first)
        else:
            at_service_of(first, bot).sync(completed(work, "released"))
            waiting = race.second(lambda: put_cohort(pool, "gpus", "gpu"), behind=first)
        first.commit()
        outcome(waiting)
    assert (cohort_of(pool, "bots"), cohort_of(pool, "jobs")) == ("gpus", "gpus")
    assert pool.row("SELECT state FROM jobs").state == "queued"


def test_a_quota_set_while_its_cohort_is_removed_finds_no_cohort(pool: Pool, race: Race) -> None:
    put_cohort(pool, "gpus", "gpu")
    with race.first() as first:
        remove_cohort(first, "gpus")
        late = race.second(lambda: Tenancy(pool).quota("team-a", maximum=1, cohort="gpus"), behind=first)
        first.commit()
        with pytest.raises(NotFound, match="no cohort 'gpus'"):
            outcome(late)
    assert pool.rows("SELECT FROM quotas") == []


@pytest.mark.parametrize("known", [True, False])
def test_a_cohort_is_not_removed_behind_a_quota_that_is_being_set(pool: Pool, race: Race, known: bool) -> None:
    put_cohort(pool, "gpus", "gpu")
    if known:
        Tenancy(pool).quota("team-a", maximum=2, cohort="gpus")
    with race.first() as first:
        Tenancy(first).quota("team-a", maximum=1, cohort="gpus")
        late = race.second(lambda: remove_cohort(pool, "gpus"), behind=first)
        first.commit()
        with pytest.raises(Conflict, match="still has quotas"):
            outcome(late)
    assert pool.row("SELECT max_quota FROM quotas").max_quota == 1


def test_two_operators_who_set_one_half_each_of_a_new_quota_both_get_it(pool: Pool, race: Race) -> None:
    def change(at: Pool, **terms: int) -> None:
        wanted = [QuotaChange("default", "team-a", terms)]
        at.database.run(lambda connection: quotas.change_quotas(connection, wanted, actor="test"))

    pool.submit(instance="team-a")
    race.in_turn(lambda first: change(first, min=2), lambda: change(pool, max=5))
    assert tuple(pool.row("SELECT min_quota, max_quota FROM quotas")) == (2, 5)


# Several assigners at what is nearly used up: nobody exceeds it, nobody ends in an error, and the pool goes on.


TURN = Statement("SELECT pg_advisory_xact_lock(hashtext('leasehold.gates'))")


@pytest.mark.conflicts
@pytest.mark.parametrize("commit", [True, False])
def test_who_planned_for_the_last_slot_leaves_it_if_another_took_it(pool: Pool, race: Race, commit: bool) -> None:
    share(pool, "acme", max_concurrent=1)
    pool.submit(20, instance="acme")
    bots = [pool.bot(f"bot-{nth}", capacity=50) for nth in range(4)]
    pool.upkeep().run_once()
    with race.first() as one:
        one.assigner().run_once()
        other = race.second(pool.assigner().run_once, behind=one)
        one.decide(commit)
        other.result(MINUTE)
    assert race.errors == (["40001"] if commit else [])
    assert used(pool, "instance:acme:jobs") == 1
    assert sum(len(bot.take()) for bot in bots) == 1


@pytest.mark.conflicts
def test_who_was_undone_leaves_jobs_at_gates_to_whose_turn_it_is_and_never_waits(pool: Pool, race: Race) -> None:
    moment = 0.0
    careful = PriorityAgeAssigner(
        pool.database,
        AssignerSettings(),
        timing=pool.timing,
        chance=pool.chance,
        name="assigner:test",
        now=lambda: moment,
    )
    share(pool, "acme", max_concurrent=2)
    pool.submit(4, instance="acme")
    bot = pool.bot(capacity=10)
    with race.first() as one:
        one.change("UPDATE counters SET most = 0 WHERE name = 'instance:acme:jobs'")
        undone = race.second(careful.run_once, behind=one)
        one.commit()
        undone.result(MINUTE)
    assert race.errors == ["40001"]
    pool.change("UPDATE counters SET most = 2 WHERE name = 'instance:acme:jobs'")
    pool.submit(2)
    with race.first() as holder:
        holder.connection.execute(TURN)
        race.unhindered(careful.run_once, by=holder)
        given = bot.take()
        assert len(given) == 2, "those that ask for nothing but a place are placed"
        moment = CAREFUL
        race.unhindered(careful.run_once, by=holder)
    bot.sync(*(active(lease) for lease in given))
    assert used(pool, "instance:acme:jobs") == 2


@pytest.mark.conflicts
def test_four_assigners_that_fight_for_a_small_limit_get_everything_done(pool: Pool, race: Race) -> None:
    most = 2
    share(pool, "acme", max_concurrent=most)
    pool.submit(16, instance="acme")
    bot = pool.bot(capacity=20)
    assigners = [pool.assigner(batch=20) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        done = 0
        for _ in range(200):
            for cycle in [threads.submit(each.run_once) for each in assigners]:
                cycle.result()
            assert used(pool, "instance:acme:jobs") <= most
            given = bot.take()
            bot.sync(*(completed(lease) for lease in given))
            done += len(given)
            if done == 16:
                break
    assert done == 16
    assert set(race.errors) <= {"40001", "40P01", "55P03"}


def test_a_transaction_that_is_undone_at_every_try_is_no_error_and_any_other_error_is_one(pool: Pool) -> None:
    raised = "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{}'; END $$"
    turns = ConflictBackoff(lambda: 0.0)
    assert (
        turns.run(pool.database, lambda c: c.execute(Statement(raised.format("serialization_failure"))), undone=list)
        is None
    )
    with pytest.raises(psycopg.Error):
        turns.run(pool.database, lambda c: c.execute(Statement(raised.format("check_violation"))), undone=list)


@pytest.mark.parametrize("error", ["query_canceled", "disk_full", "check_violation"])
def test_jobs_with_constraints_are_left_out_after_no_error_but_one_that_may_be_theirs(pool: Pool, error: str) -> None:
    raised = Statement(f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{error}'; END $$")
    turns = ConflictBackoff(lambda: 0.0)
    with pytest.raises(psycopg.Error):
        turns.run(pool.database, lambda c: c.execute(raised), undone=list)
    assert not turns.is_hindered, "no job with constraints was asked for"
    with pytest.raises(psycopg.Error):
        turns.run(pool.database, lambda c: turns.may_charge(c) and c.execute(raised), undone=list)
    assert turns.is_hindered == (error == "check_violation")


@pytest.mark.conflicts
def test_a_look_for_held_rows_comes_once_a_second_and_passes_over_resources_of_bots(pool: Pool, race: Race) -> None:
    moment = 0.0
    turns = ConflictBackoff(lambda: moment)
    pool.bot(resources={"memory_mib": 9})
    pool.change("INSERT INTO counters (name) VALUES ('lock:tree')")
    waited = Statement("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'lock_not_available'; END $$")
    assert turns.run(pool.database, lambda c: c.execute(waited), undone=list) is None
    with race.first() as stranger:
        stranger.connection.execute_sql("SELECT FROM counters FOR UPDATE")
        held = pool.database.run(turns.held_rows)
        assert held is not None
        assert held.names == {"lock:tree"}
    assert pool.database.run(turns.held_rows) is held
    moment = LOOK_INTERVAL
    assert pool.database.run(turns.held_rows) == HeldRows(frozenset(), frozenset())


@pytest.mark.conflicts
@pytest.mark.parametrize("hold", ["quotas WHERE max_quota = 7", "counters WHERE name LIKE 'lock:%'", "usage_meters"])
def test_jobs_that_need_a_row_that_somebody_holds_keep_no_others_from_starting(
    pool: Pool, tenancy: Tenancy, race: Race, hold: str
) -> None:
    tenancy.quota("acme", maximum=7)
    share(pool, "shared")
    pool.bot(capacity=50)
    pool.change("INSERT INTO usage_meters VALUES ('plan', 1, 4, NULL, now(), now())")
    pool.change(
        "INSERT INTO windows (name, starts, ends, zone, types, match, meter, usage_threshold, meter_max_age)"
        " VALUES ('day', 0, 24, 'UTC', '{all}', 'exact', 'plan', 80, 600)"
    )
    # The row of the counter is there.
    pool.submit(instance="acme", terms={"locks": ["tree"]})
    pool.assigner().run_once()
    for priority in (-9, -8):
        pool.submit(instance="acme", priority=priority)
    pool.change("UPDATE counters SET most = 9, limited_by = ''")
    held = pool.submit(2, instance="acme", priority=-10, terms={"locks": ["tree"]})
    others = [*pool.submit(), *pool.submit(instance="shared"), *pool.submit(terms={"locks": ["other"]})]
    others += pool.submit(terms={"job_class": "random"})
    settings = DatabaseSettings(lock_timeout=0.05)
    with closing(Database(pool.database.url, settings, role="test", chance=pool.chance)) as database:
        assigner = Pool(database, pool.timing, pool.chance).assigner(now=clock.monotonic)
        with race.first() as stranger, capture_logs() as logs:
            stranger.connection.execute_sql(f"SELECT FROM {hold} FOR UPDATE")
            for _ in range(3):
                assigner.run_once()
            assert set(others) <= set(pool.granted())
            assert hold == "usage_meters" or not set(held) & set(pool.granted())
        assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
            "somebody holds a row, so jobs that need it do not start"
        ]
        race.forget_errors()
    pool.assigner().run_once()
    assert set(held) <= set(pool.granted())
