"""One assigner, cycle by cycle."""

import pytest

from schema.moves.cancel import cancel
from schema.picking import ready
from tests.support.pool import Pool, completed
from tests.support.race import Race
from tests.support.tenancy import Tenancy


def test_the_most_urgent_job_goes_first_and_the_oldest_among_equals(pool: Pool) -> None:
    (later,) = pool.submit(priority=5)
    (first,) = pool.submit(priority=-5)
    (second,) = pool.submit(priority=-5)
    bot = pool.bot()
    for _ in range(3):
        pool.assigner().run_once()
        for work in bot.take():
            pool.change("UPDATE bots SET draining = true")
            bot.sync(completed(work))
            pool.change("UPDATE bots SET draining = false")
    assert pool.granted() == [first, second, later]


def test_a_share_of_the_cycles_takes_the_oldest_job_whatever_its_priority(pool: Pool) -> None:
    (oldest,) = pool.submit(priority=5)
    pool.submit(priority=-5)
    pool.bot()
    pool.assigner(priority_percentage=0).run_once()
    assert pool.granted() == [oldest]


def test_the_pause_is_interval_plus_jitter_and_short_after_work(pool: Pool) -> None:
    assigner = pool.assigner(interval=2.0, jitter=3.0, busy_sleep_factor=0.01)
    pauses = [assigner.run_once() for _ in range(20)]
    assert all(2.0 <= pause <= 5.0 for pause in pauses)
    assert len(set(pauses)) > 1
    pool.submit()
    pool.bot()
    assert 0.02 <= assigner.run_once() <= 0.05


def test_a_failed_match_earns_half_an_interval_that_grows_while_nothing_matches(pool: Pool) -> None:
    assigner = pool.assigner(interval=2.0, jitter=0.0, failure_backoff=0.0, failure_backoff_cap=0.0)
    pool.submit(properties={"os": "plan9"})
    assert [assigner.run_once() for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_job_that_no_bot_offers_waits_longer_after_each_failure_up_to_a_cap(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "plan9"})
    pool.bot(properties={"os": "linux"})
    assigner = pool.assigner(failure_backoff=5.0, failure_backoff_cap=12.0)
    waits = []
    for _ in range(3):
        assigner.run_once()
        row = pool.row("SELECT looks, reason, extract(epoch FROM schedule_after - now()) AS wait FROM queues")
        waits.append(float(row.wait))
        pool.rest_queues(-1)
    assert (row.looks, row.reason) == (3, "no healthy bot offers what it requires")
    assert 4 < waits[0] < 6 < 9 < waits[1] < 11.1 < 11.5 < waits[2] < 13.3
    assert pool.job(job).state == "queued"


def test_a_cap_that_equals_the_backoff_makes_every_rest_exactly_so_long(pool: Pool) -> None:
    pool.submit(properties={"os": "plan9"})
    assigner = pool.assigner(failure_backoff=5.0, failure_backoff_cap=5.0)
    for look in range(1, 6):
        began = pool.row("SELECT clock_timestamp() AS at").at
        assigner.run_once()
        row = pool.row(
            "SELECT looks, schedule_after - interval '5 s' AS rested_at, clock_timestamp() AS at FROM queues"
        )
        assert row.looks == look
        assert began <= row.rested_at <= row.at
        pool.rest_queues(-1)


def test_a_job_larger_than_any_free_bot_backs_off_and_does_not_hold_up_smaller_ones(pool: Pool) -> None:
    (large,) = pool.submit(units=8, priority=-10)
    (small,) = pool.submit(units=1)
    pool.bot(capacity=4)
    assigner = pool.assigner()
    assigner.run_once()
    assert pool.granted() == [small]
    row = pool.queue_of(large)
    assert (row.looks, row.reason) == (1, "no bot that offers what it requires has enough free units")


def test_a_job_whose_bots_are_merely_full_keeps_its_place_without_backoff(pool: Pool) -> None:
    pool.submit(2)
    pool.bot()
    assigner = pool.assigner()
    assigner.run_once()
    assigner.run_once()
    row = pool.row("SELECT looks, schedule_after FROM queues")
    assert (row.looks, row.schedule_after) == (0, None)


@pytest.mark.parametrize("units", [1, 2])
def test_a_job_whose_bots_are_merely_locked_keeps_its_place_without_backoff(pool: Pool, race: Race, units: int) -> None:
    (job,) = pool.submit(units=units)
    pool.bot(capacity=2)
    assigner = pool.assigner()
    with race.first() as other:
        other.row("SELECT id FROM bots FOR UPDATE")
        race.unhindered(assigner.run_once, by=other)
        row = pool.queue_of(job)
        assert (row.looks, row.schedule_after, pool.granted()) == (0, None, [])
    assigner.run_once()
    assert pool.granted() == [job]


def test_a_bot_that_arrives_frees_the_jobs_that_waited_for_it(pool: Pool) -> None:
    (job,) = pool.submit(properties={"os": "plan9"})
    assigner = pool.assigner(failure_backoff=60.0, failure_backoff_cap=60.0)
    assigner.run_once()
    assert pool.queue_of(job).schedule_after is not None

    pool.bot(properties={"os": ["plan9", "linux"]})
    assigner.run_once()

    assert pool.granted() == [job]


def test_requirements_are_matched_by_containment_with_any_number_of_properties(pool: Pool) -> None:
    offered = {f"p{number}": ["a", "b"] for number in range(30)}
    wanted = {f"p{number}": "b" for number in range(0, 30, 2)}
    (matching,) = pool.submit(properties=wanted)
    pool.submit(properties={**wanted, "p1": "c"})
    pool.bot(capacity=2, properties=offered)
    pool.assigner().run_once()
    assert pool.granted() == [matching]
    assert pool.row("SELECT count(*) AS links FROM kind_platforms").links == 1


def test_a_requirement_set_that_appears_later_finds_the_bots_that_are_there(pool: Pool) -> None:
    pool.bot(properties={"os": "linux", "gpu": "a100"})
    (job,) = pool.submit(properties={"gpu": "a100"})
    pool.assigner().run_once()
    assert pool.granted() == [job]


def test_an_assigner_restricted_to_instances_leaves_the_others_alone(pool: Pool) -> None:
    pool.submit(instance="a")
    (mine,) = pool.submit(instance="b")
    pool.bot(capacity=2)
    pool.assigner(instances=("b", "unknown")).run_once()
    assert pool.granted() == [mine]


def test_a_bot_for_one_instance_gets_only_its_jobs(pool: Pool) -> None:
    pool.submit(instance="a")
    (mine,) = pool.submit(instance="b")
    pool.bot(capacity=2, instance="b")
    pool.assigner().run_once()
    assert pool.granted() == [mine]


def test_a_batch_fills_the_bots_there_are_and_no_more(pool: Pool) -> None:
    pool.submit(50)
    for number in range(4):
        pool.bot(f"bot-{number}", capacity=5)
    pool.assigner(batch=100).run_once()
    assert [row.in_use for row in pool.rows("SELECT in_use FROM bots")] == [5, 5, 5, 5]
    assert pool.row("SELECT count(*) AS n FROM jobs WHERE state = 'queued'").n == 30
    assert pool.row("SELECT looks FROM queues").looks == 0


def test_when_the_chosen_bot_is_locked_another_healthy_one_is_taken(pool: Pool) -> None:
    pool.submit()
    pool.bot("good", priority=-5)
    pool.bot("spare", priority=5)
    with pool.database.connect() as holder:
        holder.execute_sql("SELECT 1 FROM bots WHERE name = 'good' FOR UPDATE")
        pool.assigner().run_once()
        holder.rollback()
    row = pool.row(
        "SELECT b.name, e.details FROM live l JOIN bots b ON b.id = l.bot_id, job_events e WHERE move='grant'"
    )
    assert row.name == "spare"
    assert row.details["round"] == 0, "the fall-back, after the sampling rounds"


def test_a_job_whose_only_bot_is_locked_is_not_punished(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot()
    assigner = pool.assigner(interval=1.0, jitter=0.0, busy_sleep_factor=0.01)
    with pool.database.connect() as holder:
        holder.execute_sql("SELECT 1 FROM bots FOR UPDATE")
        pause = assigner.run_once()
        holder.rollback()
    assert pool.job(job).schedule_after is None
    assert pause == pytest.approx(0.01), "a lost race is tried again at once"


def test_assigners_side_by_side_do_not_pick_the_same_jobs(pool: Pool) -> None:
    pool.submit(20)
    pool.bot(capacity=100)
    with pool.database.begin() as one, pool.database.begin() as two:
        picks = [
            ready.pick(connection, ready.Scope(), order=ready.Order.PRIORITY, batch=10) for connection in (one, two)
        ]
    found = [job.id for jobs in picks for job in jobs]
    assert len(found) == len(set(found)) == 20


def test_locality_of_a_finished_job_draws_the_next_one(pool: Pool) -> None:
    pool.submit(locality_hint="repo")
    first, second = pool.bot("first"), pool.bot("second")
    pool.assigner().run_once()
    holder = first if first.sync()["leases"] else second
    (work,) = holder.take()
    pool.submit(locality_hint="other")
    holder.sync(completed(work))
    pool.change("UPDATE bots SET draining = false")
    for work in holder.take():
        holder.sync(completed(work))
    pool.submit(locality_hint="repo")
    pool.assigner().run_once()
    row = pool.row("SELECT b.name FROM live l JOIN bots b ON b.id = l.bot_id")
    assert row.name == holder.session.bot


def test_a_bot_keeps_only_its_latest_locality_hints(pool: Pool) -> None:
    bot = pool.bot(capacity=20)
    for number in range(12):
        pool.submit(locality_hint=f"repo-{number}")
    pool.assigner().run_once()
    for work in bot.take():
        bot.sync(*[completed(work)], *[])
        break
    hints = {row.hint for row in pool.rows("SELECT hint FROM bot_localities")}
    assert len(hints) == 1


def test_a_job_that_waited_for_room_goes_on_when_its_bot_has_room_again(pool: Pool) -> None:
    (small,) = pool.submit(priority=-1)
    bot = pool.bot(capacity=4, sync_service=pool.sync_service(enabled=False))
    assigner = pool.assigner(failure_backoff=60.0)
    assigner.run_once()
    (work,) = bot.take()
    (large,) = pool.submit(units=4)
    assigner.run_once()
    assert pool.queue_of(large).schedule_after is not None

    bot.sync(completed(work, "released"), capacity=4)
    pool.database.run(lambda c: cancel(c, [small], instances=None, sync=1.0, actor="test"))
    assigner.run_once()

    assert pool.job(large).state == "leased"


def test_a_retry_that_is_due_goes_before_a_crowd_that_nobody_can_place(pool: Pool) -> None:
    pool.submit(500, properties={"os": "plan9"}, priority=-10)
    (retry,) = pool.submit()
    pool.bot()
    pool.rest_queues(-1, "priority = -10")
    pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s' WHERE priority = 0")
    pool.assigner(batch=10).run_once()
    assert pool.granted() == [retry]


def test_any_number_of_jobs_that_nobody_can_run_rest_with_their_queues_in_one_cycle(pool: Pool) -> None:
    for number in range(30):
        pool.submit(100, properties={"os": f"plan{number}"})
    before = pool.rows("SELECT id, xmin FROM jobs ORDER BY id")
    pool.assigner().run_once()
    assert pool.row("SELECT count(*) AS n FROM queues WHERE looks = 1").n == 30
    assert pool.rows("SELECT id, xmin FROM jobs ORDER BY id") == before, "not one job was written"


def test_a_job_that_comes_into_a_queue_that_rests_waits_with_it(pool: Pool) -> None:
    pool.submit(properties={"os": "plan9"})
    assigner = pool.assigner(failure_backoff=60.0)
    assigner.run_once()
    (late,) = pool.submit(properties={"os": "plan9"})
    assert pool.queue_of(late).schedule_after is not None
    pool.bot(capacity=2, properties={"os": "plan9"})
    assigner.run_once()
    assert pool.job(late).state == "leased"


def test_a_minimum_is_reached_in_one_cycle_however_many_queues_are_open(pool: Pool, tenancy: Tenancy) -> None:
    tenancy.quota("needy", minimum=40)
    needed = set(pool.submit(40, instance="needy", priority=5))
    for number in range(120):
        pool.submit(instance=f"team-{number}")
    pool.bot(capacity=60)
    pool.assigner(batch=50).run_once()
    assert needed <= set(pool.granted())
