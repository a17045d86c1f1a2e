"""Whose fault a failure is, and bots on probation: limited to one lease until they succeed, or for a while."""

from structlog.testing import capture_logs

from schema import probation
from tests.counting import blamed, count, counts, ends, given, on_probation, work_off
from tests.explaining import closed, explained
from tests.pool import Bot, Pool, active, completed
from tests.racing import Race, cancel, expire
from tests.tenancy import Tenancy, assign


def three(pool: Pool, capacity: int = 4) -> list[Bot]:
    return [pool.bot(f"bot-{n}", capacity=capacity) for n in (1, 2, 3)]


def let_down(pool: Pool, bot: Bot, other: Bot, *, jobs: int = 3) -> None:
    """Jobs fail on one bot and then pass on another."""
    for job in work_off(pool, bot, "failed", jobs=jobs, retry_failed=True):
        ends(pool, other, job)


def suspected(pool: Pool, *, capacity: int = 4) -> tuple[Bot, Bot]:
    """A bot that is on probation, and one that is not."""
    count(pool)
    bot, other = pool.bot("bot-1", capacity=capacity), pool.bot("bot-2")
    let_down(pool, bot, other)
    pool.upkeep().run_once()
    assert on_probation(pool) == ["bot-1"]
    return bot, other


def test_a_job_that_fails_on_several_bots_is_to_blame_and_they_get_their_charges_back(pool: Pool) -> None:
    count(pool)
    first, second, third = three(pool)
    (job,) = work_off(pool, first, "failed", retry_failed=True)
    assert (counts(pool), blamed(pool)) == ({("bot-1", ""): (0, 1)}, [("bot-1", False)])
    ends(pool, second, job, "failed")
    pool.upkeep().run_once()
    assert (counts(pool), blamed(pool)) == ({("bot-1", ""): (0, 0)}, [(None, False)])
    ends(pool, third, job, "failed")
    pool.upkeep().run_once()
    assert (counts(pool), blamed(pool)) == ({("bot-1", ""): (0, 0)}, [(None, False)])


def test_a_charge_is_given_back_though_the_job_passes_before_upkeep_comes(pool: Pool) -> None:
    count(pool)
    first, second, third = three(pool)
    (job,) = work_off(pool, first, "failed", retry_failed=True)
    ends(pool, second, job, "failed")
    ends(pool, third, job)
    assert blamed(pool) == [("bot-1", False)]
    pool.upkeep().run_once()
    assert (counts(pool)["bot-1", ""], blamed(pool)) == ((0, 0), [(None, False)])


def test_a_job_costs_a_bot_one_charge_however_often_it_fails_there(pool: Pool) -> None:
    count(pool)
    bot = pool.bot()
    (job,) = work_off(pool, bot, "failed", retry_failed=True)
    ends(pool, bot, job, "error")
    ends(pool, bot, job, "failed")
    assert counts(pool) == {("bot-1", ""): (0, 1)}
    ends(pool, bot, job)
    assert (counts(pool), blamed(pool)) == ({("bot-1", ""): (1, 1)}, [])


def test_a_job_that_passes_elsewhere_leaves_the_charge_where_it_failed(pool: Pool) -> None:
    count(pool)
    first, second, _ = three(pool)
    (job,) = work_off(pool, first, "failed", retry_failed=True)
    ends(pool, second, job)
    assert counts(pool) == {("bot-1", ""): (0, 1), ("bot-2", ""): (1, 0)}
    assert blamed(pool) == [("bot-1", True)]


def test_a_job_that_is_to_blame_and_passes_in_the_end_charges_nobody(pool: Pool) -> None:
    count(pool)
    first, second, third = three(pool)
    (job,) = work_off(pool, first, "failed", retry_failed=True)
    ends(pool, second, job, "failed")
    pool.upkeep().run_once()
    ends(pool, third, job)
    assert counts(pool) == {("bot-1", ""): (0, 0), ("bot-3", ""): (1, 0)}
    assert blamed(pool) == []


def test_the_last_failure_of_a_job_gives_the_charge_back_too(pool: Pool) -> None:
    count(pool)
    first, second, _ = three(pool)
    (job,) = work_off(pool, first, "failed", retry_failed=True, max_attempts=2)
    ends(pool, second, job, "failed")
    assert pool.job(job).state == "failed"
    pool.upkeep().run_once()
    assert (counts(pool), blamed(pool)) == ({("bot-1", ""): (0, 0)}, [(None, False)])


def test_a_job_that_kills_its_bots_is_to_blame(pool: Pool) -> None:
    """Three bots are lost to it, and none is charged in the end."""
    count(pool)
    (job,) = pool.submit()
    for bot in three(pool):
        given(pool, bot, job)
        pool.change("UPDATE bots SET expires_at = now() - interval '1 s' WHERE name = :name", name=bot.session.bot)
        expire(pool)
    assert pool.job(job).state == "dead"
    pool.upkeep().run_once()
    assert counts(pool) == {("bot-1", ""): (0, 0)}


def test_a_bot_whose_failures_passed_elsewhere_is_put_on_probation(pool: Pool) -> None:
    count(pool)
    first, second, _ = three(pool)
    let_down(pool, first, second, jobs=2)
    pool.upkeep().run_once()
    assert on_probation(pool) == []
    let_down(pool, first, second, jobs=1)
    with capture_logs() as logs:
        pool.upkeep().run_once()
    assert on_probation(pool) == ["bot-1"]
    assert [(entry["log_level"], entry["bot"]) for entry in logs] == [("warning", "bot-1")]
    assert blamed(pool) == []
    row = pool.row("SELECT extract(epoch FROM probation_until - now()) AS left FROM bots WHERE name = 'bot-1'")
    assert 590 < row.left <= 600


def test_a_success_between_its_failures_spares_a_bot(pool: Pool) -> None:
    count(pool)
    first, second, _ = three(pool)
    let_down(pool, first, second, jobs=2)
    work_off(pool, first)
    let_down(pool, first, second, jobs=1)
    pool.upkeep().run_once()
    assert on_probation(pool) == []


def test_a_bot_on_probation_gets_one_lease_at_a_time(pool: Pool) -> None:
    """In one batch, in the next cycle, and when it fetches."""
    bot, other = suspected(pool)
    other.sync(status="gone")
    jobs = pool.submit(5)
    pool.assigner().run_once()
    pool.assigner().run_once()
    (work,) = bot.take()
    assert pool.row("SELECT in_use, free FROM bots WHERE name = 'bot-1'") == (1, False)
    (again,) = bot.sync(completed(work, "failed"))["leases"]
    assert again["job"] != work["job"]
    pool.assigner().run_once()
    assert pool.row("SELECT in_use FROM bots WHERE name = 'bot-1'").in_use == 1
    assert sorted(pool.job(job).state for job in jobs) == ["failed", "leased", "queued", "queued", "queued"]


def test_a_bot_on_probation_may_have_a_lease_of_many_units(pool: Pool) -> None:
    bot, other = suspected(pool)
    other.sync(status="gone")
    pool.submit(2, units=2)
    pool.assigner().run_once()
    (work,) = bot.take()
    assert pool.row("SELECT in_use FROM bots WHERE name = 'bot-1'").in_use == 2
    bot.sync(completed(work))


def test_what_a_bot_runs_when_it_is_put_on_probation_goes_on(pool: Pool) -> None:
    count(pool)
    pool.submit(2)
    bot = pool.bot(capacity=4)
    pool.assigner().run_once()
    works = bot.take()
    pool.change("UPDATE bots SET probation_until = now() + interval '1 minute'")
    pool.submit()
    pool.assigner().run_once()
    held = bot.sync(*[active(work) for work in works])["leases"]
    assert sorted(lease["job"] for lease in held) == sorted(work["job"] for work in works)


def test_a_success_ends_a_probation_at_once(pool: Pool) -> None:
    bot, _ = suspected(pool)
    work_off(pool, bot)
    assert on_probation(pool) == []
    assert pool.row("SELECT free FROM bots WHERE name = 'bot-1'").free


def test_time_ends_a_probation(pool: Pool) -> None:
    suspected(pool)
    pool.change("UPDATE bots SET probation_until = now() - interval '1 s' WHERE probation_until IS NOT NULL")
    pool.upkeep().run_once()
    assert on_probation(pool) == []


def test_without_counting_there_is_no_probation(pool: Pool) -> None:
    suspected(pool)
    count(pool, statistics=False)
    pool.upkeep().run_once()
    assert on_probation(pool) == []


def test_probation_can_be_turned_off_by_itself(pool: Pool) -> None:
    count(pool, probation_failures=0)
    first, second, _ = three(pool)
    let_down(pool, first, second, jobs=4)
    pool.upkeep().run_once()
    assert on_probation(pool) == []


def test_a_new_session_does_not_end_a_probation(pool: Pool) -> None:
    bot, _ = suspected(pool)
    pool.restarted(bot)
    assert on_probation(pool) == ["bot-1"]


def test_a_bot_that_somebody_is_at_work_on_is_put_on_probation_the_next_time(pool: Pool, race: Race) -> None:
    count(pool)
    first, second, _ = three(pool)
    let_down(pool, first, second)
    with race.first() as ahead:
        ahead.change("SELECT FROM bots WHERE name = 'bot-1' FOR NO KEY UPDATE")
        assert race.unhindered(lambda: pool.database.run(probation.review), by=ahead).begun == []
        ahead.commit()
    assert pool.database.run(probation.review).begun == ["bot-1"]


def test_explain_tells_that_every_bot_is_on_probation_with_a_lease(pool: Pool) -> None:
    bot, other = suspected(pool)
    other.sync(status="gone")
    (first,) = pool.submit()
    given(pool, bot, first)
    (waiting,) = pool.submit()
    found = explained(pool, waiting)
    assert closed(found) == ["probation"]
    assert found.sentence == (
        "it does not run because 1 such bot, all on probation with the one lease that each may have"
    )
    assert found.change == ["a success of a matching bot on probation, or the end of that"]
    cancel(pool, waiting)


def test_nobody_is_evicted_for_a_job_that_the_bots_probation_would_keep_out(pool: Pool) -> None:
    tenancy = Tenancy(pool)
    tenancy.quota("team-a", minimum=1)
    pool.submit(2, instance="team-b", priority=10)
    bot = pool.bot(capacity=2)
    pool.assigner().run_once()
    bot.take()
    pool.change("UPDATE bots SET probation_until = now() + interval '1 minute'")
    pool.submit(instance="team-a")
    assign(pool)
    assert (tenancy.asked(), tenancy.evictions()) == (0, 0)
    pool.change("UPDATE bots SET probation_until = NULL")
    assign(pool)
    assert tenancy.asked() == 1
