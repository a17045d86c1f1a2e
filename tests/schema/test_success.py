"""Counting how often bots succeed, in the transaction that ends an attempt; and nothing at all while it is off."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from assigner.config.loading import load
from assigner.maintenance.unnamed_rows import gone_bots
from assigner.process.assign import declare
from assigner.settings import PoolSettings
from schema.fleet import credit, success
from schema.moves import end
from schema.moves import retention as retention_moves
from schema.moves.end import AttemptEnd, Verdict
from tests.support.explain import closed, explained
from tests.support.http import audited
from tests.support.plans import statements, watching
from tests.support.pool import (
    Bot,
    Pool,
    active,
    blamed,
    completed,
    count,
    counts,
    ends,
    granted_lease,
    on_probation,
    work_off_counting,
)
from tests.support.race import Race, at_service_of, cancel, expire, outcome, retention
from tests.support.sync import crew, together
from tests.support.tenancy import Tenancy, assign

COUNTING = {"success_policy", "bot_success", "blames"}


def rate(pool: Pool, label: str = "") -> dict[str, float]:
    """Bots by name with their rates as an assigner reads them."""
    names = {row.id: row.name for row in pool.rows("SELECT id, name FROM bots")}
    found = pool.database.run(lambda connection: success.success_rates(connection, list(names), [label]))
    return {names[bot_id]: round(value, 6) for (bot_id, _), value in found.items()}


def test_successes_are_counted_by_bot_and_label_above_a_prior_until_the_bot_goes(pool: Pool) -> None:
    """A bot starts as one that succeeded twice of two times, so that one failure says little of it. Work that is given
    back unfinished says nothing; latency is that of attempts with a result."""
    count(pool)
    bot = pool.bot(capacity=4)
    work_off_counting(pool, bot, jobs=3, label="build")
    work_off_counting(pool, bot, "failed", label="build")
    work_off_counting(pool, bot, "failed", label="test")
    for verdict in ("succeeded", "error", "released"):
        work_off_counting(pool, bot, verdict)
    assert counts(pool, "successes", "failures", "finished") == {
        ("bot-1", "build"): (3, 1, 4),
        ("bot-1", "test"): (0, 1, 1),
        ("bot-1", ""): (1, 1, 1),
    }
    assert (rate(pool, "build"), rate(pool, "test")) == ({"bot-1": round(5 / 6, 6)}, {"bot-1": round(2 / 3, 6)})
    cancel(pool, *[str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE finished_at IS NULL")])
    retention(pool)
    bot.sync(status="gone")
    pool.change("UPDATE bots SET opened_at = now() - interval '9 days'")
    leaving = gone_bots(pool.database, age=60.0)
    assert (leaving.run_once(), leaving.deleted) == (False, 1)
    assert pool.rows("SELECT FROM bot_success") == []


@pytest.mark.parametrize(("delivered", "expected"), [(True, {("bot-1", ""): (0, 1)}), (False, {})])
def test_a_lost_bot_is_charged_with_what_it_had_been_given(
    pool: Pool, delivered: bool, expected: dict[tuple[str, str], tuple[float, ...]]
) -> None:
    count(pool)
    pool.submit()
    bot = pool.bot()
    pool.assigner().run_once()
    if delivered:
        bot.take()
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s'")
    expire(pool)
    assert counts(pool) == expected


@pytest.mark.parametrize("asked", [True, False], ids=["by somebody", "by its timeout"])
def test_what_is_asked_to_stop_is_charged_only_if_it_outlived_its_timeout(pool: Pool, asked: bool) -> None:
    """A command that is killed may well end with an error."""
    count(pool)
    for verdict in ("stopped", "failed") if asked else ("stopped",):
        job, bot, work = pool.running(timeout_seconds=60.0)
        if asked:
            cancel(pool, job)
        else:
            pool.change("UPDATE leases SET due_at = now() - interval '1 s'")
            pool.upkeep().run_once()
        bot.sync(completed(work, verdict))
    assert (pool.job(job).state, counts(pool)) == (("failed", {}) if asked else ("dead", {("bot-1", ""): (0, 1)}))


def test_the_average_latency_is_that_of_finished_attempts(pool: Pool) -> None:
    count(pool)
    bot = pool.bot()
    for seconds in (1, 3):
        (job,) = pool.submit()
        work = granted_lease(pool, bot, job)
        pool.change("UPDATE leases SET acknowledged_at = now() - make_interval(secs => :s)", s=seconds)
        bot.sync(completed(work))
    ((finished, seconds_spent),) = counts(pool, "finished", "seconds").values()
    assert finished == 2
    assert seconds_spent == pytest.approx(4, abs=1)


def test_old_attempts_are_forgotten_as_new_ones_come(pool: Pool) -> None:
    """A bot that went bad shows it however long it had been good: its counts never grow beyond the memory."""
    count(pool, memory=4)
    bot = pool.bot()
    work_off_counting(pool, bot, jobs=6)
    assert counts(pool) == {("bot-1", ""): (4, 0)}
    work_off_counting(pool, bot, "failed", jobs=2)
    assert counts(pool) == {("bot-1", ""): (round(4 * 0.8 * 0.8, 6), round(1.8 * 0.8, 6))}


def test_a_bot_keeps_the_counts_of_its_latest_labels(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credit, "LABELS", 2)
    count(pool)
    bot = pool.bot()
    for label in ("a", "b", "a", "c", "d"):
        work_off_counting(pool, bot, label=label)
    assert set(counts(pool)) == {("bot-1", "c"), ("bot-1", "d")}


def test_bots_of_a_batch_are_counted_in_as_many_statements_as_one(pool: Pool) -> None:
    count(pool)
    bots, works = crew(pool, 12, label="build")
    calls = [bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)]
    with statements() as one:
        together(bots[0].sync_service, calls[0])
    with statements() as many:
        together(bots[0].sync_service, *calls[1:])
    assert many == one
    assert set(counts(pool).values()) == {(1, 0)}
    assert len(counts(pool)) == 12


def test_several_attempts_of_one_bot_in_one_call_all_count(pool: Pool) -> None:
    count(pool)
    bot = pool.bot(capacity=4)
    pool.submit(4)
    verdicts = ("succeeded", "failed") * 2
    bot.sync(*[completed(work, verdict) for work, verdict in zip(pool.given(bot), verdicts, strict=True)])
    assert counts(pool) == {("bot-1", ""): (2, 2)}


def test_off_a_finish_sends_the_same_statements_and_touches_no_table_of_counts(pool: Pool) -> None:
    """Off is the default; what is looked at is one empty table, once for each statement, of which nothing is read."""
    (*bots, _), (*works, work) = crew(pool, 4, locality_hint="warm")
    with statements() as sent:
        together(bots[0].sync_service, *[bot.message(completed(work)) for bot, work in zip(bots, works, strict=True)])
    assert not [statement for statement in sent if "bot_success" in statement or "blames" in statement]
    assert counts(pool) == {}
    lease = pool.row("SELECT job_id, fence, bot_id, bot_epoch FROM live")
    ending = AttemptEnd(lease.job_id, work["fence"], lease.bot_id, lease.bot_epoch, Verdict.SUCCEEDED)
    with pool.database.connect() as connection, watching(connection) as watch:
        assert len(end.end(connection, [ending], actor="test")) == 1
    looked = [node for plan in watch.plans for node in plan.nodes if node.relation in COUNTING]
    assert [(node.relation, node.touched) for node in looked] == [("success_policy", 0)]


def test_a_statistic_is_part_of_the_finish_or_there_is_neither(pool: Pool, race: Race) -> None:
    """A gateway that is killed before its commit has counted nothing, and after it everything."""
    count(pool)
    job, bot, work = pool.running()
    message = bot.message(completed(work))
    with race.first() as killed:
        together(killed.sync_service(), message)
        assert counts(killed) == {("bot-1", ""): (1, 0)}
        killed.roll_back()
    assert (pool.job(job).state, counts(pool)) == ("running", {})
    together(bot.sync_service, message)
    together(bot.sync_service, message)
    assert (pool.job(job).state, counts(pool)) == ("succeeded", {("bot-1", ""): (1, 0)})


def test_two_finishes_for_one_bots_counts_both_count(pool: Pool, race: Race) -> None:
    """One session's end charges the bot while the other one finishes there: the second waits and sees the first."""
    count(pool)
    bot = pool.bot(capacity=2)
    pool.submit(2)
    pool.assigner().run_once()
    first, second = bot.take()
    with race.first() as ahead:
        answer = at_service_of(ahead, bot).sync(completed(first), active(second))
        assert answer["leases"]
        bot.seq += 1
        behind = race.second(lambda: bot.sync(completed(second, "failed")), behind=ahead)
        ahead.commit()
    outcome(behind)
    assert counts(pool) == {("bot-1", ""): (1, 1)}


def test_a_charge_that_is_given_back_neither_waits_for_its_bot_nor_is_lost(pool: Pool, race: Race) -> None:
    """A job fails elsewhere while its first bot is at the desk: nobody waits, and upkeep comes back to it."""
    count(pool)
    first, second = pool.bot("bot-1", capacity=2), pool.bot("bot-2", capacity=2)
    (tried,) = work_off_counting(pool, first, "failed", retry_failed=True)
    again = granted_lease(pool, second, tried)
    (other,) = pool.submit()
    work = granted_lease(pool, first, other)
    with race.first() as ahead:
        at_service_of(ahead, first).sync(completed(work))
        race.unhindered(lambda: second.sync(completed(again, "failed")), by=ahead)
        race.unhindered(lambda: pool.database.run(success.review_probation), by=ahead)
        ahead.commit()
    assert counts(pool, "successes", "failures", "returned") == {("bot-1", ""): (1, 1, 0)}
    pool.database.run(success.review_probation)
    assert counts(pool, "successes", "failures", "returned") == {("bot-1", ""): (1, 0, 1)}


def test_the_configuration_turns_counting_on_and_off_for_every_process(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "leasehold.toml"

    def say(text: str) -> None:
        file.write_text(text)
        declare(pool.database, load(file, PoolSettings, {}))

    say("[success]\nstatistics = true\nmemory = 50.0")
    say("[success]\nstatistics = true\nmemory = 50.0")
    say("")
    row = pool.row("SELECT memory, probation_failures, probation_seconds FROM success_policy")
    assert tuple(row) == (50.0, 3, 600.0)
    say("[success]\nstatistics = false")
    assert pool.rows("SELECT FROM success_policy") == []
    assert audited(pool.database) == ["success.set"] * 2


def test_a_job_keeps_what_its_bot_was_chosen_by(pool: Pool) -> None:
    count(pool)
    work_off_counting(pool, pool.bot("bot-1"), "failed", jobs=2)
    pool.bot("bot-2", capacity=2)
    (job,) = pool.submit()
    pool.assigner(strategy={"kind": "success"}).run_once()
    row = pool.row("SELECT details FROM job_events WHERE job_id = :id AND move = 'grant'", id=pool.job(job).id)
    assert row.details == {
        "bot": "bot-2", "candidates": 2, "strategy": "success", "round": 1,
        "score": {"total": 1.0, "success_rate": 1.0, "load": 0.0},
    }  # fmt: skip


@pytest.mark.parametrize("asked", [{"resources": {"cpu_milli": 100}}, {"batch_key": "x"}])
def test_jobs_with_resources_or_of_a_batch_go_by_what_was_counted_too(pool: Pool, asked: dict[str, object]) -> None:
    count(pool)
    bots = [pool.bot(name, capacity=4, resources={"cpu_milli": 400}) for name in ("bot-1", "bot-2")]
    work_off_counting(pool, bots[0], "failed", jobs=3)
    work_off_counting(pool, bots[1])
    pool.submit(2, terms=asked)
    pool.assigner(strategy={"kind": "success"}).run_once()
    assert [row.in_use for row in pool.rows("SELECT in_use FROM bots ORDER BY name")] == [0, 2]


@pytest.mark.parametrize(
    ("strategy", "read"), [({}, False), ({"weights": {"success": 1.0}}, True), ({"kind": "success"}, True)]
)
def test_rates_are_read_by_those_who_want_them_only(pool: Pool, strategy: dict[str, object], read: bool) -> None:
    count(pool)
    pool.bot()
    pool.submit()
    with statements() as sent:
        pool.assigner(strategy=strategy).run_once()
    assert [("bot_success" in statement) for statement in sent].count(True) == int(read)
    assert pool.row("SELECT state FROM jobs").state == "leased"


# Whose fault a failure is, and bots on probation: limited to one lease until they succeed, or for a while.


def three(pool: Pool, capacity: int = 4) -> list[Bot]:
    return [pool.bot(f"bot-{n}", capacity=capacity) for n in (1, 2, 3)]


def let_down(pool: Pool, bot: Bot, other: Bot, *, jobs: int = 3) -> None:
    """Jobs fail on one bot and then pass on another."""
    for job in work_off_counting(pool, bot, "failed", jobs=jobs, retry_failed=True):
        ends(pool, other, job)


def suspected(pool: Pool, *, capacity: int = 4) -> tuple[Bot, Bot]:
    """A bot that is on probation, and one that is not."""
    count(pool)
    bot, other = pool.bot("bot-1", capacity=capacity), pool.bot("bot-2")
    let_down(pool, bot, other)
    pool.upkeep().run_once()
    assert on_probation(pool) == ["bot-1"]
    return bot, other


#: What becomes of a job: how it ends on which bots, and where upkeep comes (None). Then the counts of bots, and whom it
#: has charged.
CHARGES: dict[str, tuple[list[tuple[int, str] | None], dict[int, tuple[float, ...]], list[tuple[str | None, bool]]]] = {
    "it fails on one": ([(1, "failed")], {1: (0, 1)}, [("bot-1", False)]),
    "on two": ([(1, "failed"), (2, "failed"), None], {1: (0, 0)}, [(None, False)]),
    "on three": ([(1, "failed"), (2, "failed"), None, (3, "failed"), None], {1: (0, 0)}, [(None, False)]),
    "on two and passes": ([(1, "failed"), (2, "failed"), None, (3, "succeeded")], {1: (0, 0), 3: (1, 0)}, []),
    "and passes before upkeep comes": (
        [(1, "failed"), (2, "failed"), (3, "succeeded"), None],
        {1: (0, 0), 3: (1, 0)},
        [(None, False)],
    ),
    "on one, however often": ([(1, "failed"), (1, "error"), (1, "failed")], {1: (0, 1)}, [("bot-1", False)]),
    "on one and passes there": ([(1, "failed"), (1, "error"), (1, "succeeded")], {1: (1, 1)}, []),
    "on one and passes elsewhere": ([(1, "failed"), (2, "succeeded")], {1: (0, 1), 2: (1, 0)}, [("bot-1", True)]),
}


@pytest.mark.parametrize(("ended", "counted", "charged"), CHARGES.values(), ids=CHARGES)
def test_a_job_charges_its_first_bot_once_and_gives_the_charge_back_if_it_fails_elsewhere_too(
    pool: Pool,
    ended: list[tuple[int, str] | None],
    counted: dict[int, tuple[float, ...]],
    charged: list[tuple[str | None, bool]],
) -> None:
    count(pool)
    bots = three(pool)
    (job,) = pool.submit(retry_failed=True)
    for each in ended:
        if each is None:
            pool.upkeep().run_once()
        else:
            ends(pool, bots[each[0] - 1], job, each[1])
    assert counts(pool) == {(f"bot-{bot}", ""): found for bot, found in counted.items()}
    assert blamed(pool) == charged


def test_the_last_failure_of_a_job_gives_the_charge_back_too_and_old_charges_are_forgotten(pool: Pool) -> None:
    count(pool)
    first, second, _ = three(pool)
    job, *_ = work_off_counting(pool, first, "failed", jobs=2, retry_failed=True, max_attempts=2)
    ends(pool, second, job, "failed")
    assert pool.job(job).state == "failed"
    pool.upkeep().run_once()
    assert (counts(pool), blamed(pool)) == ({("bot-1", ""): (0, 1)}, [(None, False), ("bot-1", False)])
    pool.change("UPDATE blames SET at = at - interval '2 d' WHERE job_id = (SELECT min(job_id) FROM blames)")
    assert pool.database.run(lambda c: retention_moves.delete_old_blames(c, age=86400.0, limit=10)) == 1
    assert blamed(pool) == [("bot-1", False)]


def test_a_charge_that_another_review_gives_back_is_left_to_it(pool: Pool, race: Race) -> None:
    count(pool)
    first, second, _ = three(pool)
    (job,) = work_off_counting(pool, first, "failed", retry_failed=True)
    ends(pool, second, job, "failed")
    with race.first() as other:
        other.change("UPDATE blames SET bot_id = NULL")
        race.unhindered(lambda: pool.database.run(success.review_probation), by=other)
        other.commit()
    pool.database.run(success.review_probation)
    assert counts(pool, "failures", "returned")["bot-1", ""] == (1, 0)


def test_charges_of_jobs_that_are_gone_keep_no_other_from_being_given_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(success, "REVIEW_LIMIT", 2)
    count(pool)
    first, second, _ = three(pool)
    pool.change("INSERT INTO blames (job_id, bot_id, returned_at) SELECT -n, 1, now() FROM generate_series(1, 3) n")
    (job,) = work_off_counting(pool, first, "failed", retry_failed=True)
    ends(pool, second, job, "failed")
    for _ in range(2):
        pool.database.run(success.review_probation)
    assert counts(pool, "failures", "returned")["bot-1", ""] == (0, 1)
    assert pool.rows("SELECT FROM blames WHERE bot_id IS NOT NULL AND returned_at IS NOT NULL") == []


def test_a_job_that_kills_its_bots_is_to_blame(pool: Pool) -> None:
    """Three bots are lost to it, and none is charged in the end."""
    count(pool)
    (job,) = pool.submit()
    for bot in three(pool):
        granted_lease(pool, bot, job)
        pool.change("UPDATE bots SET expires_at = now() - interval '1 s' WHERE name = :name", name=bot.session.bot)
        expire(pool)
    assert pool.job(job).state == "dead"
    pool.upkeep().run_once()
    assert counts(pool) == {("bot-1", ""): (0, 0)}


def test_a_bot_that_was_only_cut_off_is_not_charged(pool: Pool) -> None:
    count(pool)
    first, second, _ = three(pool)
    (job,) = pool.submit()
    granted_lease(pool, first, job)
    pool.change("UPDATE bots SET expires_at = now() - interval '1 s' WHERE name = 'bot-1'")
    expire(pool)
    ends(pool, second, job)
    assert blamed(pool) == [("bot-1", True)]
    pool.restarted(first, cut_off=True)
    pool.upkeep().run_once()
    assert (counts(pool).get(("bot-1", "")), blamed(pool)) == ((0, 0), [(None, False)])


def test_a_bot_whose_failures_passed_elsewhere_is_put_on_probation_unless_it_succeeds_between_them(pool: Pool) -> None:
    count(pool)
    first, second, _ = three(pool)
    let_down(pool, first, second, jobs=2)
    work_off_counting(pool, first)
    for jobs in (1, 1):
        let_down(pool, first, second, jobs=jobs)
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


def test_a_bot_on_probation_gets_one_lease_at_a_time_of_any_size(pool: Pool) -> None:
    """In one batch, in the next cycle, and when it fetches."""
    bot, other = suspected(pool)
    other.sync(status="gone")
    jobs = pool.submit(5, units=2)
    pool.assigner().run_once()
    (work,) = pool.given(bot)
    assert pool.row("SELECT in_use, free FROM bots WHERE name = 'bot-1'") == (2, False)
    (again,) = bot.sync(completed(work, "failed"))["leases"]
    assert again["job"] != work["job"]
    pool.assigner().run_once()
    assert pool.row("SELECT in_use FROM bots WHERE name = 'bot-1'").in_use == 2
    assert sorted(pool.job(job).state for job in jobs) == ["failed", "leased", "queued", "queued", "queued"]


@pytest.mark.parametrize("how", ["success", "time", "counting is turned off", "a new session"])
def test_a_probation_ends_by_a_success_or_by_time_and_not_by_a_new_session(pool: Pool, how: str) -> None:
    bot, _ = suspected(pool)
    match how:
        case "success":
            work_off_counting(pool, bot)
            assert pool.row("SELECT free FROM bots WHERE name = 'bot-1'").free
        case "time":
            pool.change("UPDATE bots SET probation_until = now() - interval '1 s' WHERE probation_until IS NOT NULL")
            pool.upkeep().run_once()
        case "a new session":
            pool.restarted(bot)
        case _:
            count(pool, statistics=False)
            pool.upkeep().run_once()
    assert on_probation(pool) == (["bot-1"] if how == "a new session" else [])


def test_probation_can_be_turned_off_by_itself(pool: Pool) -> None:
    count(pool, probation_failures=0)
    first, second, _ = three(pool)
    let_down(pool, first, second, jobs=4)
    pool.upkeep().run_once()
    assert on_probation(pool) == []


def test_what_a_bot_runs_when_it_is_put_on_probation_goes_on(pool: Pool) -> None:
    count(pool)
    pool.submit(2)
    bot = pool.bot(capacity=4)
    works = pool.given(bot)
    pool.change("UPDATE bots SET probation_until = now() + interval '1 minute'")
    pool.submit()
    pool.assigner().run_once()
    held = bot.sync(*[active(work) for work in works])["leases"]
    assert sorted(lease["job"] for lease in held) == sorted(work["job"] for work in works)


def test_a_bot_that_somebody_is_at_work_on_is_put_on_probation_the_next_time(pool: Pool, race: Race) -> None:
    count(pool)
    first, second, _ = three(pool)
    let_down(pool, first, second)
    with race.first() as ahead:
        ahead.change("SELECT FROM bots WHERE name = 'bot-1' FOR NO KEY UPDATE")
        assert race.unhindered(lambda: pool.database.run(success.review_probation), by=ahead).begun == []
        ahead.commit()
    assert pool.database.run(success.review_probation).begun == ["bot-1"]


def test_explain_tells_that_every_bot_is_on_probation_with_a_lease(pool: Pool) -> None:
    bot, other = suspected(pool)
    other.sync(status="gone")
    (first,) = pool.submit()
    granted_lease(pool, bot, first)
    (waiting,) = pool.submit()
    found = explained(pool, waiting)
    assert closed(found) == ["probation"]
    assert found.sentence == (
        "it does not run because 1 such bot is on probation, with the one lease that each may have"
    )
    assert found.change == ["a success of a matching bot on probation, or the end of that"]
    cancel(pool, waiting)


def test_nobody_is_evicted_for_a_job_that_the_bots_probation_would_keep_out(pool: Pool) -> None:
    tenancy = Tenancy(pool)
    tenancy.quota("team-a", minimum=1)
    pool.submit(2, instance="team-b", priority=10)
    bot = pool.bot(capacity=2)
    pool.given(bot)
    pool.change("UPDATE bots SET probation_until = now() + interval '1 minute'")
    pool.submit(instance="team-a")
    assign(pool)
    assert (tenancy.stop_requests(), tenancy.evictions()) == (0, 0)
    pool.change("UPDATE bots SET probation_until = NULL")
    assign(pool)
    assert tenancy.stop_requests() == 1
