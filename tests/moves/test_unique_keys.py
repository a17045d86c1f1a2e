"""What becomes of an equal deduplication key: it is kept for a time, refused, replaced or put off."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from leasehold.errors import BadInput, Conflict, QueueFull

from schema.moves.submit import Submitted, submit
from tests.support.pool import Pool, completed
from tests.support.race import Race, at_service_of, cancel, outcome, park, retention, unpark

KEY = {"dedup_key": "reindex"}
REPLACE, REFUSE, HOUR = KEY | {"on_conflict": "replace"}, KEY | {"on_conflict": "refuse"}, KEY | {"unique_for": 3600.0}
PAYLOAD = "SELECT w.payload->'command'->>0 FROM job_payloads w JOIN jobs j ON j.id = w.job_id WHERE j.public_id = :id"


def asked(pool: Pool, *requests: dict[str, Any]) -> list[Submitted]:
    given = [{"instance": "default", "properties": {}, "payload": {"command": ["new"]}} | each for each in requests]
    return pool.database.run(lambda c: submit(c, given, actor="test"))


def later(pool: Pool, seconds: float) -> None:
    """Let so much time pass for jobs and keys."""
    for table, columns in {"jobs": ("created_at", "queued_at", "schedule_after"), "unique_keys": ("until",)}.items():
        past = ", ".join(f"{column} = {column} - interval '{seconds} s'" for column in columns)
        pool.change(f"UPDATE {table} SET {past}")


def starts_in(pool: Pool, job: str) -> float:
    start = pool.job(job).schedule_after
    return 0.0 if start is None else round((start - datetime.now(UTC)).total_seconds())


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled", "deleted", "expired"])
def test_a_key_is_kept_for_its_time_by_success_alone(pool: Pool, end: str) -> None:
    job, bot, work = pool.running(**HOUR)
    (joined,) = asked(pool, HOUR)
    assert (joined.created, joined.public_id == job) == (False, False), "while it runs it is joined as ever"
    match end:
        case "cancelled":
            cancel(pool, joined.public_id)
            cancel(pool, job)
            bot.sync(completed(work, "stopped"))
        case _:
            bot.sync(completed(work, "failed" if end == "failed" else "succeeded"))
    if end == "expired":
        later(pool, 3601)
    if end == "deleted":
        assert retention(pool) == 1
    is_kept = end in ("succeeded", "deleted")
    for fields in (KEY, HOUR, REPLACE | {"unique_for": 9.0}):
        (again,) = asked(pool, fields)
        assert (again.public_id == job, again.created) == (is_kept, not is_kept), fields
        if not is_kept:
            cancel(pool, again.public_id)
    if is_kept:
        with pytest.raises(Conflict, match=f"'reindex' is kept for job {job}, which has succeeded"):
            asked(pool, REFUSE)
    later(pool, 3601)
    pool.retention().run_once()
    assert pool.rows("SELECT * FROM unique_keys") == []


def test_a_taken_key_is_refused_where_a_request_says_so_and_nothing_of_the_list_is_stored(pool: Pool) -> None:
    (job,) = pool.submit(**KEY)
    with pytest.raises(Conflict, match=rf"jobs\.1\.dedup_key: 'reindex' is that of job {job}, which is queued") as bad:
        asked(pool, {}, REFUSE)
    assert (bad.value.code, len(pool.rows("SELECT FROM jobs"))) == ("key_taken", 1)
    cancel(pool, job)
    (own,) = asked(pool, REFUSE | {"key": "k"})
    assert asked(pool, REFUSE | {"key": "k"}) == [own._replace(created=False)], "a repeat is no conflict"
    with pytest.raises(Conflict, match="which is queued"):
        asked(pool, KEY | {"dedup_key": "other"}, REFUSE | {"dedup_key": "other"})


@pytest.mark.parametrize("state", ["queued", "parked", "tried before"])
def test_a_job_that_waits_is_replaced_in_its_place(pool: Pool, state: str) -> None:
    if state == "tried before":
        job, bot, work = pool.running(retry_failed=True, **KEY)
        bot.sync(completed(work, "failed"))
        rest = pool.job(job).schedule_after
    else:
        (job,) = pool.submit(metadata={"build": "1"}, estimated_cost=5.0, terms={"locks": ["a"]}, **KEY)
    if state == "parked":
        park(pool, job)
    before = pool.job(job)
    same_queue = {"terms": {"locks": ["a"]}} if state != "tried before" else {}
    fields = {"priority": -3, "max_attempts": 1, "queue_timeout_seconds": 60.0, "metadata": {"build": "2"}}
    (answer,) = asked(pool, REPLACE | same_queue | fields)
    assert (answer.public_id, answer.created) == (job, False)
    row = pool.job(job)
    assert (row.state, row.queue, row.queued_at, row.priority) == (before.state, before.queue, before.queued_at, -3)
    assert row.queue_deadline == row.queued_at + timedelta(seconds=60)
    assert row.schedule_after == (rest if state == "tried before" else None)
    assert row.max_attempts == row.attempts + 1, "it is tried once more at least"
    assert pool.row(PAYLOAD, id=job)[0] == "new"
    assert pool.rows("SELECT value FROM job_metadata") == [("2",)]
    assert pool.history(job)[-1] == "replace"
    if state == "queued":
        assert (pool.job(asked(pool, REPLACE | {"units": 2})[0].public_id).units, pool.job(job).state) == (
            2,
            "cancelled",
        )
    elif state == "parked":
        asked(pool, REPLACE | {"units": 2})
        unpark(pool, job)
        assert (pool.job(job).units, pool.job(job).state) == (2, "queued")


def test_a_job_that_a_bot_has_goes_on_and_the_key_passes_to_a_new_one_unless_it_is_kept(pool: Pool) -> None:
    job, bot, work = pool.running(**KEY)
    first, second = asked(pool, REPLACE, REPLACE | {"payload": {"command": ["newest"]}})
    assert (first.created, second.created, first.public_id) == (True, False, second.public_id)
    assert (first.public_id == job, pool.job(job).state, pool.job(job).dedup_key) == (False, "running", None)
    assert pool.row(PAYLOAD, id=first.public_id)[0] == "newest"
    bot.sync(completed(work))
    kept, _, _ = pool.running(**HOUR | {"dedup_key": "kept"})
    (joined,) = asked(pool, REPLACE | {"dedup_key": "kept"})
    assert not joined.created
    assert pool.rows("SELECT FROM job_followers f JOIN jobs j ON j.id = f.job_id WHERE j.public_id = :id", id=kept)


def test_a_job_that_is_shared_is_not_replaced(pool: Pool) -> None:
    job, joined = pool.submit(**KEY) + pool.submit(**KEY)
    for _ in range(2):
        with pytest.raises(Conflict, match=f"is that of job {job}, which several submissions share") as refused:
            asked(pool, REPLACE)
        assert refused.value.code == "key_taken"
        cancel(pool, job)
    cancel(pool, joined)
    assert asked(pool, REPLACE)[0].created


def test_each_submit_puts_a_debounced_job_off_until_the_longest_wait_after_the_first(pool: Pool) -> None:
    debounce = KEY | {"debounce": 30.0, "debounce_max": 60.0}
    (job,) = pool.submit(**debounce)
    assert starts_in(pool, job) == 30
    for passed, wait in ((20, 30), (15, 25), (20, 5), (10, 0)):
        later(pool, passed)
        (again,) = asked(pool, debounce)
        assert (again.public_id, starts_in(pool, job)) == (job, wait)
    (moved,) = asked(pool, debounce | {"units": 2})
    assert (moved.public_id == job, starts_in(pool, moved.public_id)) == (False, 0), "of the work, not of one job"


def test_limits_hold_for_what_replaces_a_job(pool: Pool) -> None:
    (job,) = pool.submit(label="a", **KEY)
    pool.submit(label="b")
    pool.change("INSERT INTO queue_limits (label, max_queued) VALUES ('a', 1), ('b', 1)")
    assert asked(pool, REPLACE | {"label": "a"})[0].public_id == job, "it is counted already"
    with pytest.raises(QueueFull, match="label 'b' may have 1 queued jobs"):
        asked(pool, REPLACE | {"label": "b"})
    pool.change("INSERT INTO submit_rules (commands) VALUES ('{make}')")
    with pytest.raises(BadInput, match="'new' is not among the programs"):
        asked(pool, REPLACE | {"label": "a"})


@pytest.mark.parametrize("commit", [True, False])
def test_a_replace_and_a_lease_of_one_job_come_one_after_the_other(pool: Pool, race: Race, commit: bool) -> None:
    (job,) = pool.submit(**KEY)
    pool.bot()
    with race.first() as first:
        first.assigner().run_once()
        late = race.second(lambda: asked(pool, REPLACE)[0], behind=first)
        first.decide(commit)
        answer = outcome(late)
    assert (answer.created, pool.job(job).state) == (commit, "leased" if commit else "queued")
    with race.first() as first:
        asked(first, REPLACE | {"priority": 7})
        race.unhindered(pool.assigner().run_once, by=first)
        first.commit()
    assert pool.job(answer.public_id).state == "queued"


@pytest.mark.parametrize("fields", [REPLACE, HOUR, HOUR | REPLACE], ids=["replace", "keep", "both"])
@pytest.mark.parametrize("commit", [True, False])
def test_two_submits_of_one_key_make_one_job(pool: Pool, race: Race, fields: dict[str, Any], commit: bool) -> None:
    with race.first() as first:
        (mine,) = asked(first, fields)
        late = race.second(lambda: asked(pool, fields)[0], behind=first)
        first.decide(commit)
        found = outcome(late)
    assert (found.created, len(pool.rows("SELECT FROM jobs"))) == (not commit, 1)
    assert (found.job_id == mine.job_id) == commit
    assert len(pool.rows("SELECT FROM unique_keys WHERE job_id = :id", id=found.job_id)) == ("unique_for" in fields)


def test_who_waits_for_the_end_of_a_job_that_keeps_its_key_gets_it(pool: Pool, race: Race) -> None:
    job, bot, work = pool.running(**HOUR)
    with race.first() as first:
        at_service_of(first, bot).sync(completed(work))
        late = [race.second(lambda each=each: asked(pool, each)[0], behind=first) for each in (KEY, HOUR)]  # type: ignore[misc]
        first.commit()
        assert [(outcome(each).public_id, outcome(each).created) for each in late] == [(job, False)] * 2
    with race.first() as first:
        asked(first, HOUR)
        assert race.unhindered(lambda: retention(pool), by=first) == 1


def test_a_caller_in_sql_says_the_same(pool: Pool) -> None:
    query = "SELECT public_id::text, created FROM submit(CAST(:jobs AS jsonb))"
    request = {"command": ["sql"], **REPLACE, "unique_for": 60, "debounce": 5}
    (first,), (second,) = (pool.rows(query, jobs=json.dumps([request])) for _ in range(2))
    assert (first.created, second.created, first.public_id) == (True, False, second.public_id)
    with pytest.raises(Exception, match="is that of job"):
        pool.rows(query, jobs=json.dumps([{"command": ["sql"], **REFUSE}]))
