"""While somebody holds a snapshot open nothing dead can be removed: what bots cost stays as it was, and nothing is
missed by those who look at the newest first."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from bots.protocol import LeaseReport
from bots.sync.settle import LOCK_BOTS
from schema.picking.queues import pending_work
from schema.postgres.connection import Connection
from schema.postgres.engine import libpq_url
from schema.postgres.statements import Statement
from schema.predicates import has_ready_jobs
from tests.support.plans import Plan, watched, watching
from tests.support.pool import Bot, Pool, active, completed
from tests.support.race import Race, at_service_of, cancel, outcome

#: Jobs that the bot holds at once, and its calls while the snapshot is held.
CAPACITY, CALLS = 5, 100
#: Pages that a statement of a call may touch more at the end than at the beginning: trees have grown, other pages are
#: full. Measured: 6 at most; those that looked at all that is dead touched 22 to 104 more.
GROWTH = 15
#: The statements of a call that look for its bot, by words of theirs. What a bot holds is read only if something of it
#: lasts.
STATEMENTS = {"lock": "b.kept_units, b.kind", "held": "NULL AS payload", "write": "SET sync_seq"}


def _reports(held: list[dict[str, Any]], *, lasting: bool) -> list[LeaseReport]:
    """All that the bot holds is done, except for the first of it if that is `lasting`."""
    return [active(held[0])] * lasting + [completed(work) for work in held[lasting:]]


def _watched(race: Race, bot: Bot, held: list[dict[str, Any]], *, lasting: bool) -> list[Plan]:
    """The plans of a call that ends and fetches; what it fetches is then in `held`."""
    with race.first() as inside:
        with watching(inside.connection) as watch:
            held[:] = at_service_of(inside, bot).sync(*_reports(held, lasting=lasting))["leases"]
        bot.seq += 1
        inside.commit()
    return watch.plans


def _buffers(plans: list[Plan], *, lasting: bool) -> dict[str, int]:
    return {
        name: sum(plan.buffers for plan in plans if words in plan.query)
        for name, words in STATEMENTS.items()
        if lasting or name != "held"
    }


@pytest.mark.parametrize("lasting", [False, True])
def test_a_call_costs_as_much_after_others_though_a_snapshot_is_held(pool: Pool, race: Race, lasting: bool) -> None:
    bot = pool.bot(capacity=CAPACITY)
    pool.submit(CAPACITY * (CALLS + 10))
    pool.assigner().run_once()
    held = bot.sync()["leases"]
    for _ in range(6):
        held = bot.sync(*_reports(held, lasting=lasting))["leases"]
    before = _buffers(_watched(race, bot, held, lasting=lasting), lasting=lasting)
    assert all(before.values()), f"a statement is not found by its words: {before}"
    with psycopg.connect(libpq_url(pool.database.url)) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM leasehold.bots")
        for _ in range(CALLS):
            held = bot.sync(*_reports(held, lasting=lasting))["leases"]
        after = _buffers(_watched(race, bot, held, lasting=lasting), lasting=lasting)
    more = {name: after[name] - before[name] for name in before}
    assert max(more.values()) <= GROWTH, f"before {before}, after {after}"


def test_a_lease_that_lasts_is_listed_however_many_others_began_and_ended_after_it(pool: Pool) -> None:
    (long,) = pool.submit()
    bot = pool.bot(capacity=2)
    (work,) = pool.given(bot)
    pool.submit(20)
    pool.assigner().run_once()
    for _ in range(20):
        (quick,) = [each for each in bot.sync(active(work))["leases"] if each["job"] != long]
        answer = bot.sync(active(work), completed(quick))
        assert long in [each["job"] for each in answer["leases"]]
    cancel(pool, long)
    (told,) = bot.sync(active(work))["leases"]
    assert (told["job"], told["state"]) == (long, "cancelling")
    bot.sync(completed(work, "stopped"))
    assert pool.row("SELECT held, in_use FROM bots") == (0, 0)


def test_what_a_bot_reports_with_two_fences_or_does_not_hold_hides_nothing_of_what_it_holds(pool: Pool) -> None:
    (other,) = pool.submit()
    stranger = pool.bot("stranger")
    (foreign,) = pool.given(stranger)
    mine = pool.submit(2)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    first, second = bot.sync()["leases"]
    older = LeaseReport(job=first["job"], fence=first["fence"] - 1, state="active")
    reports = [active(first), older, active(foreign), LeaseReport(job="no id", fence=1, state="active")]
    answer = bot.sync(*reports)
    told = {lease["job"]: lease["state"] for lease in answer["leases"]}
    assert told == {first["job"]: "active", second["job"]: "pending"}
    assert {first["job"], second["job"]} == set(mine)
    assert pool.job(other).state == "running"


@pytest.mark.parametrize("commit", [True, False])
def test_a_call_that_waits_for_a_grant_to_its_bot_tells_of_the_lease(pool: Pool, race: Race, commit: bool) -> None:
    bot = pool.bot(capacity=2)
    first = pool.submit()
    (work,) = pool.given(bot)
    second = pool.submit(max_attempts=2)
    with race.first() as ahead:
        ahead.assigner().run_once()
        future = race.second(lambda: at_service_of(pool, bot).sync(active(work), status="draining"), behind=ahead)
        ahead.decide(commit)
    told = [lease["job"] for lease in outcome(future)["leases"]]
    assert told == (first + second if commit else first)
    assert pool.row("SELECT held, in_use FROM bots") == ((2, 2) if commit else (1, 1))


@pytest.mark.parametrize("commit", [True, False])
def test_a_session_that_opens_behind_a_grant_gives_back_that_lease_too(pool: Pool, race: Race, commit: bool) -> None:
    bot = pool.bot(capacity=2)
    pool.submit()
    pool.given(bot)
    (late,) = pool.submit()
    with race.first() as ahead:
        ahead.assigner().run_once()
        future = race.second(lambda: pool.restarted(bot), behind=ahead)
        ahead.decide(commit)
    outcome(future)
    assert pool.job(late).state == "queued"
    assert pool.rows("SELECT job_id FROM live") == []
    assert pool.row("SELECT held, in_use FROM bots") == (0, 0)


@pytest.mark.parametrize("commit", [True, False])
def test_a_grant_behind_a_call_finds_the_room_that_the_call_has_left(pool: Pool, race: Race, commit: bool) -> None:
    """The call ends one lease and leaves room; the assigner passes over its bot, and then counts on from there."""
    bot = pool.bot(capacity=1, sync_service=pool.sync_service(enabled=False))
    pool.submit()
    (work,) = pool.given(bot)
    (waiting,) = pool.submit()
    with race.first() as ahead:
        Bot(ahead.sync_service(enabled=False), bot.session, bot.seq).sync(completed(work))
        race.unhindered(lambda: pool.assigner().run_once(), by=ahead)
        assert pool.job(waiting).state == "queued"
        ahead.decide(commit)
    pool.change("UPDATE jobs SET schedule_after = NULL WHERE state = 'queued'")
    pool.assigner().run_once()
    assert pool.job(waiting).state == ("leased" if commit else "queued")
    assert pool.row("SELECT held, in_use FROM bots") == (1, 1)


@pytest.mark.parametrize("terms", [None, {"resource_class": "gpu"}], ids=["plain", "constrained"])
def test_whether_jobs_wait_is_asked_for_as_little_though_a_snapshot_is_held(pool: Pool, terms: Any) -> None:
    """Before those that wait, in the order of each index, are the dead entries of all that have started meanwhile."""
    pool.bot()
    looks: dict[str, Callable[[Connection], object]] = {
        "of an assigner": lambda c: pending_work(c, quiet=True),
        "of a call": lambda c: c.execute(LOCK_BOTS, {"names": ["bot-1"], "fetches": True}).all(),
        "at a queue": lambda c: c.execute(Statement(f"SELECT {has_ready_jobs('queues')} FROM queues")).all(),
    }

    def buffers() -> dict[str, int]:
        with pool.database.connect() as connection:
            return {name: watch.buffers for name, watch in watched(connection, looks, kept=True).items()}

    pool.submit(3, terms=terms)
    before = buffers()
    with psycopg.connect(libpq_url(pool.database.url)) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM leasehold.bots")
        pool.submit(2000, terms=terms)
        pool.submit(3, terms=terms)
        (newest,) = pool.row("SELECT max(id) - 3 FROM jobs")
        pool.change(
            "WITH gone AS (UPDATE jobs SET state = 'cancelled', finished_at = now() WHERE id <= :newest RETURNING id)"
            " INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)"
            " SELECT id, 'cancel', 'queued', 'cancelled', 0, 'test' FROM gone",
            newest=newest,
        )
        after = buffers()
    more = {name: after[name] - before[name] for name in before}
    assert max(more.values()) <= GROWTH, f"before {before}, after {after}"


def test_an_idle_assigner_seldom_steps_over_what_a_held_snapshot_keeps(pool: Pool, race: Race) -> None:
    """Where nothing waits, a look for jobs reads all dead entries. After one that took long a pick takes its place for
    twenty times as long. It remembers where the jobs began that it has seen."""
    seconds = iter(range(1_000_000))
    pool.bot()
    pool.submit()
    assigner = pool.assigner(now=lambda: float(next(seconds)))
    assigner.run_once()
    cycles, whole = 24, 0
    with psycopg.connect(libpq_url(pool.database.url)) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM leasehold.bots")
        cancel(pool, *pool.submit(1000))
        for _ in range(cycles):
            with race.first() as inside, watching(inside.connection) as watch:
                assigner._database = inside.database
                assigner.run_once()
            whole += sum(plan.buffers > 50 and "rest_seconds" in plan.query for plan in watch.plans)
    assert 1 <= whole <= cycles / 2, f"{whole} of {cycles} cycles have stepped over all"
