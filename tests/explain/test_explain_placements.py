"""Why a job ran where it ran: the decision that was kept, its attempts, and the receipts of preemption."""

from schema.postgres.statements import Statement
from tests.support.explain import explained, preempted
from tests.support.pool import Pool, completed
from tests.support.race import cancel
from tests.support.servers import Served
from tests.support.tenancy import Tenancy


def test_a_running_job_tells_the_score_by_which_its_bot_won(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot("bot-1", capacity=1)
    pool.bot("bot-2", capacity=3)
    pool.assigner().run_once()
    found = explained(pool, job)
    (attempt,) = found.attempts
    assert found.sentence == (
        "it runs there because bot 'bot-2' was the best of 2 candidates with 3 points "
        "(priority +0, capacity +3, locality +0)"
    )
    assert (attempt.bot, attempt.assigner, attempt.strategy) == ("bot-2", "assigner:test", "capacity")
    assert attempt.decision["score"] == {"total": 3.0, "priority": 0.0, "capacity": 3.0, "locality": 0.0}
    assert (attempt.decision["round"], attempt.decision["candidates"]) == (1, 2)
    assert attempt.sentence == "waits for its bot to begin"
    assert (found.gates, found.order, found.change) == ([], None, [])


def test_a_final_job_tells_every_attempt_and_how_it_ended(pool: Pool) -> None:
    job, bot, work = pool.running(retry_failed=True)
    bot.sync(completed(work, "failed", exit_code=3))
    pool.change("UPDATE jobs SET schedule_after = now() - interval '1 s'")
    (again,) = pool.given(bot)
    bot.sync(completed(again, exit_code=0))
    found = explained(pool, job)
    assert found.state == "succeeded"
    assert [each.sentence for each in found.attempts] == ["failed with exit 3, and it was queued again", "succeeded"]
    assert found.sentence.startswith("it ran there because bot 'bot-1' was the best of 1 candidate")


def test_a_job_given_back_by_a_lost_bot_says_so_while_it_waits(pool: Pool) -> None:
    job, _, _ = pool.running()
    pool.bot("bot-1")
    found = explained(pool, job)
    assert found.state == "queued"
    assert found.attempts[0].sentence == "was lost with its bot: its bot started anew, and it was queued again"
    assert found.gates


def test_a_job_that_its_bot_fetched_itself_tells_that(pool: Pool) -> None:
    _, bot, work = pool.running()
    (second,) = pool.submit()
    bot.sync(completed(work))
    found = explained(pool, second)
    assert found.attempts[0].strategy == "proactive"
    assert found.sentence == (
        "it runs there because bot 'bot-1' asked for more work when it had finished something, and this was the most "
        "urgent it may have"
    )


def test_a_job_that_lost_its_first_choice_tells_in_which_round_it_was_placed(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.bot("bot-1")
    with pool.database.connect() as other:
        other.execute(Statement("SELECT FROM bots WHERE name = 'bot-1' FOR UPDATE"))
        pool.bot("bot-2", priority=1)
        pool.assigner().run_once()
        other.rollback()
    found = explained(pool, job)
    assert found.attempts[0].decision["round"] == 0
    assert found.sentence.startswith("it runs there because bot 'bot-2' was the best of 1 candidate with")
    assert found.sentence.endswith("of all that were free, after a sample had left it without one")


def test_a_job_cancelled_before_it_ran_never_had_a_place(pool: Pool) -> None:
    (job,) = pool.submit()
    pool.change("UPDATE jobs SET state = 'cancelled', finished_at = now(), reason = 'cancelled before it started'")
    pool.change(
        "INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)"
        " SELECT id, 'cancel', 'queued', 'cancelled', fence, 'test' FROM jobs"
    )
    found = explained(pool, job)
    assert found.sentence == "it is cancelled and never ran: cancelled before it started"


def test_both_jobs_of_a_preemption_keep_its_receipt(pool: Pool, tenancy: Tenancy) -> None:
    job, victim = preempted(pool, tenancy)
    gained, suffered = explained(pool, job), explained(pool, victim)
    assert gained.receipts[0].sentence.startswith("1 job was asked to stop on bot 'bot-1' for it, 1 unit, by the rule")
    assert "its instance was below its minimum of 1 with 0 units" in gained.receipts[0].sentence
    assert gained.receipts[0].receipt["victims"][0]["job"] == victim
    assert suffered.receipts[0].sentence == (
        f"it was asked to stop for job {job} of instance 'team-a', which was below its minimum of 1 with 0 units, "
        "by the rule lower_priority_only"
    )
    assert suffered.attempts[0].sentence == "is asked to stop (preempt)"


def test_a_tenant_learns_nothing_of_the_others_from_a_receipt(pool: Pool, tenancy: Tenancy) -> None:
    job, victim = preempted(pool, tenancy)
    for own, other, name in ((job, victim, "team-b"), (victim, job, "team-a")):
        mine = pool.row(
            "SELECT i.name FROM jobs j JOIN instances i ON i.id = j.instance WHERE j.public_id = CAST(:id AS uuid)",
            id=own,
        ).name
        told = explained(pool, own, instances=[mine]).model_dump_json()
        assert other not in told
        assert name not in told
        assert ("bot-1" in told) == (own == victim), "only the bot that had the job is told"


def test_a_tenant_sees_the_bots_it_may_use_and_none_by_name(pool: Pool) -> None:
    (job,) = pool.submit(instance="team-a", properties={"gpu": "a100"})
    pool.bot("secret-bot", properties={"gpu": "a100"}, instance="team-b")
    for instances, gate in ((None, "instance"), (["team-a"], "cohort")):
        found = explained(pool, job, instances=instances)
        assert [one.gate for one in found.gates if one.open is False] == [gate]
    told = found.model_dump_json()
    assert "team-b" not in told
    assert "secret-bot" not in told
    assert found.change == ["a bot with gpu=a100"]


def test_show_and_explain_tell_a_submitter_the_same_bot_of_its_job(pool: Pool, served: Served) -> None:
    (job,) = pool.submit(instance="ci")
    pool.bot("mine")
    pool.bot("idle", capacity=9, instance="qa")
    pool.assigner().run_once()
    with served.client(served.token("submitter", instance="ci")) as http:
        shown, told = http.get(f"/v1/jobs/{job}").json(), http.get(f"/v1/jobs/{job}/explain").json()
    (attempt,) = told["attempts"]
    (grant,) = [event for event in shown["events"] if event["move"] == "grant"]
    assert (shown["bot"], attempt["bot"]) == ("mine", "mine")
    assert (attempt["assigner"], attempt["decision"]) == (grant["actor"], grant["details"])
    assert "bot 'mine'" in told["sentence"]
    assert "idle" not in str((shown, told))


def test_a_withdrawn_submission_is_cancelled_in_show_and_in_explain(pool: Pool, served: Served) -> None:
    (job,) = pool.submit(instance="ci", dedup_key="same")
    (follower,) = pool.submit(instance="ci", dedup_key="same")
    cancel(pool, follower)
    with served.client(served.token("submitter", instance="ci")) as http:
        shown, told = http.get(f"/v1/jobs/{follower}").json(), http.get(f"/v1/jobs/{follower}/explain").json()
        assert (shown["state"], told["state"]) == ("cancelled", "cancelled")
        assert told["sentence"] == "it is cancelled; the job goes on for others who share it"
        assert (told["gates"], told["order"], told["attempts"], told["change"]) == ([], None, [], [])
        assert http.get(f"/v1/jobs/{job}/explain").json()["state"] == "queued"
