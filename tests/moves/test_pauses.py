"""Pauses: queued jobs of what is paused stay queued, say why, and start once it is resumed."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from leasehold.errors import BadInput, NotFound

from assigner.admission.rules import RULES
from assigner.explain.answer import in_few_words
from assigner.queries import demand, jobs
from schema.moves.submit import submit
from schema.moves.waiting.pause import make_ready, set_aside, set_aside_ready
from schema.moves.waiting.reschedule import reschedule
from schema.policy import pauses
from schema.tenancy import pausing
from tests.support.explain import closed, explained
from tests.support.plans import watching
from tests.support.pool import Pool, completed
from tests.support.race import Race

CALL = {"command": ["leasehold-task", "shop:pool", "shop.charge"]}


def pause(pool: Pool, kind: Any, name: str, *, instance: str = "", reason: str = "disk full") -> None:
    pool.database.run(lambda c: pausing.pause(c, kind, name, instance=instance, reason=reason, actor="ann"))


def resume(pool: Pool, kind: Any, name: str, *, instance: str = "") -> None:
    pool.database.run(lambda c: pausing.resume(c, kind, name, instance=instance, actor="ann"))


def leased(pool: Pool) -> set[str]:
    return {str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE state = 'leased'")}


def wanted(pool: Pool) -> int:
    return sum(
        each.queued for each in pool.database.run(lambda c: demand.demand(c, demand.Scale(), rules=RULES)).demand
    )


@pytest.mark.parametrize("terms", [None, {"locks": ["a:99"]}])
@pytest.mark.parametrize("kind", ["label", "task"])
def test_paused_jobs_stay_queued_while_others_pass_them_and_start_once_they_are_resumed(
    pool: Pool, kind: str, terms: Any
) -> None:
    fields: dict[str, Any] = {"label": "nightly"} if kind == "label" else {"payload": CALL}
    name = "nightly" if kind == "label" else "shop.charge"
    pause(pool, kind, name)
    paused = pool.submit(30, priority=-5, **fields, **({"terms": terms} if terms else {}))
    (free,) = pool.submit()
    for instance, count in (("", 30), ("default", 30), ("other", 0)):
        stopped = pool.database.run(lambda c, i=instance: pauses.stopped(c, kind, name, instance=i))  # type: ignore[misc]
        assert (stopped.jobs, stopped.schedules) == (count, 0)
    assert wanted(pool) == 1, "paused jobs ask for no bot"
    pool.bot(capacity=3)
    pool.assigner(batch=5).run_once()
    assert leased(pool) == {free}
    assert {pool.job(job).state for job in paused} == {"queued"}
    told = explained(pool, paused[0])
    assert closed(told) == ["pause"]
    assert told.sentence == f"it does not run because {kind} '{name}' is paused: disk full"
    row = pool.database.run(lambda c: jobs.job(c, paused[0], instances=None))
    assert row is not None
    assert row["schedule_after"] is None
    pool.database.run(lambda c: set_aside_ready(c, limit=100))
    pool.bot("bot-2", capacity=40)
    pool.assigner().run_once()
    assert (leased(pool), wanted(pool)) == ({free}, 0)
    resume(pool, kind, name)
    pool.assigner().run_once()
    assert leased(pool) == {free, *paused}


@pytest.mark.parametrize("how", ["reschedule", "replace"])
def test_a_job_that_is_set_aside_after_a_lost_attempt_starts_when_it_is_told_and_not_at_the_end_of_its_pause(
    pool: Pool, how: str
) -> None:
    (job,) = pool.submit(dedup_key="d", label="nightly")
    pool.given(pool.bot())
    pool.bot()  # of the same name: its job is queued again
    pool.change("UPDATE jobs SET schedule_after = NULL")
    pause(pool, "label", "nightly")
    assert pool.database.run(lambda c: set_aside_ready(c, limit=9)).moved == 1
    told = pool.database.run(lambda c: reschedule(c, [job], delay=0.0, instances=None, reason=None, actor="test"))
    assert told[0].starts_at is None, "the time of the pause is nobody's"
    if how == "replace":
        asked = {
            "instance": "default",
            "properties": {},
            "payload": {"command": ["x"]},
            "label": "nightly",
            "delay": 3600.0,
        }
        again = asked | {"dedup_key": "d", "on_conflict": "replace"}
        pool.database.run(lambda c: submit(c, [again], actor="test"))
    else:
        pool.database.run(lambda c: reschedule(c, [job], delay=3600.0, instances=None, reason=None, actor="test"))
    resume(pool, "label", "nightly")
    pool.database.run(lambda c: make_ready(c, limit=9))
    start = pool.job(job).schedule_after
    assert start is not None
    assert timedelta(minutes=50) < start - datetime.now(UTC) < timedelta(minutes=70)


def test_a_bot_that_asks_for_more_is_given_no_paused_job(pool: Pool) -> None:
    bot = pool.bot(capacity=1)
    pool.submit(2, label="nightly")
    (lease,) = pool.given(bot)
    pause(pool, "label", "nightly", instance="default")
    assert bot.sync(completed(lease))["leases"] == []
    pause(pool, "label", "nightly", instance="")
    resume(pool, "label", "nightly", instance="default")
    assert pool.given(bot) == [], "it is paused everywhere, too"
    resume(pool, "label", "nightly")
    assert len(pool.given(bot)) == 1


def test_a_job_that_is_set_aside_while_its_pause_ends_is_made_ready(pool: Pool, race: Race) -> None:
    pause(pool, "label", "nightly")
    (job,) = pool.submit(label="nightly")
    pool.bot()
    with race.first() as assigner:
        assigner.assigner().run_once()
        late = race.second(lambda: resume(pool, "label", "nightly"), behind=assigner)
        assigner.commit()
        late.result()
    pool.assigner().run_once()
    assert leased(pool) == {job}
    pause(pool, "label", "nightly")
    (other,) = pool.submit(label="nightly")
    pool.database.run(lambda c: set_aside_ready(c, limit=9))
    pool.change("DELETE FROM pauses")
    assert pool.database.run(lambda c: make_ready(c, limit=9)).moved == 1, "upkeep does what was left undone"
    assert pool.row("SELECT schedule_after FROM jobs WHERE public_id = CAST(:id AS uuid)", id=other)[0] is None


def test_a_walk_looks_at_each_job_once_and_never_at_more_than_a_page(pool: Pool) -> None:
    """To tell whether its task is paused takes the payload of each job, so a transaction looks at few of a million."""
    pause(pool, "task", "shop.charge")
    pause(pool, "label", "nightly")
    others = pool.submit(7)
    pool.submit(3, payload=CALL, terms={"locks": ["a:9"]})
    pool.submit(4, payload=CALL, units=2)
    pool.submit(2, label="nightly")

    def walk(look: Any) -> list[int]:
        found, after = [], None
        while not found or after is not None:
            page = pool.database.run(lambda c, after=after: look(c, after=after, limit=4))
            found.append(page.moved)
            after = page.after
        return found

    pages = walk(set_aside_ready)
    assert (sum(pages), len(pages)) == (9, 5)
    assert max(pages) <= 4
    assert walk(set_aside_ready) == [0, 0]
    assert walk(make_ready) == [0, 0], "those with the label are not even looked at"
    resume(pool, "label", "nightly")
    pool.change("DELETE FROM pauses")
    assert walk(make_ready) == [4, 3]
    pool.bot(capacity=99)
    pool.assigner().run_once()
    assert len(leased(pool)) == len(others) + 9


@pytest.mark.parametrize("kind", ["label", "task"])
def test_what_is_resumed_starts_at_once_behind_many_jobs_of_another_pause(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(pausing, "AT_ONCE", 5)
    other = {"command": ["leasehold-task", "shop:pool", "shop.other"]}
    pool.submit(9, **({"label": "other"} if kind == "label" else {"payload": other}))
    wanted_jobs = pool.submit(3, **({"label": "nightly"} if kind == "label" else {"payload": CALL}))
    names = ("other", "nightly") if kind == "label" else ("shop.other", "shop.charge")
    for name in names:
        pause(pool, kind, name)
    pool.database.run(lambda c: set_aside_ready(c, limit=100))
    resume(pool, kind, names[1])
    pool.bot(capacity=99)
    pool.assigner().run_once()
    assert leased(pool) == {*wanted_jobs}


def test_paused_jobs_in_front_are_set_aside_by_a_look_at_their_own_queues(pool: Pool) -> None:
    """However many jobs of other queues are ready, which that look would have to read."""
    pause(pool, "task", "shop.charge")
    pool.submit(300, units=3)
    paused = pool.submit(9, payload=CALL, priority=-5)
    pool.bot(capacity=2)
    assigner = pool.assigner(batch=4)
    with pool.database.connect() as connection:
        ids = [row.id for row in pool.rows("SELECT id FROM jobs WHERE priority = -5 ORDER BY id LIMIT 4")]
        with watching(connection) as seen:
            assert set_aside(connection, ids) == {*ids}
        assert sum(node.touched for plan in seen.plans for node in plan.nodes if node.relation == "jobs") < 100
    assigner.run_once()
    row = pool.row("SELECT count(*) AS jobs FROM jobs WHERE schedule_after IS NOT NULL")
    assert row.jobs == len(paused)


def test_an_instance_is_paused_by_its_drain_and_a_schedule_by_being_disabled(pool: Pool) -> None:
    (job,) = pool.submit()
    pause(pool, "instance", "default")
    pool.bot()
    pool.assigner().run_once()
    assert explained(pool, job).sentence.endswith("instance 'default' is drained: it starts nothing (disk full)")
    row = {"row_id": pool.job(job).id, "state": "queued", "reason": None}
    (listed,) = pool.database.run(lambda c: jobs.listed(c, [row]))
    assert in_few_words(listed) == "its instance is drained: disk full"
    assert [(each.kind, each.name) for each in pool.database.run(pauses.pauses)] == [("instance", "default")]
    pool.change("DELETE FROM pauses")  # as if it had been drained before there were such rows
    assert [(each.kind, each.name, each.at) for each in pool.database.run(pauses.pauses)] == [
        ("instance", "default", None)
    ]
    resume(pool, "instance", "default")
    with pytest.raises(NotFound, match="instance 'default' is not paused"):
        resume(pool, "instance", "default")
    pool.assigner().run_once()
    assert leased(pool) == {job}


@pytest.mark.parametrize(
    ("kind", "name", "instance", "refused"),
    [
        ("job", "a", "", "kind: 'job' cannot be paused: name a label, task, instance or schedule"),
        ("label", "", "", "name: must not be empty"),
        ("task", "", "", "name: must not be empty"),
        ("label", "a", "nobody", "instance: there is no instance 'nobody'"),
        ("instance", "default", "default", "instance: is the name itself"),
        ("schedule", "a", "", "instance: is missing: a schedule is one of an instance"),
        ("schedule", "a", "default", "schedule: there is no 'a'"),
        ("instance", "nobody", "", "instance: there is no instance 'nobody'"),
    ],
)
def test_what_cannot_be_paused_is_refused(pool: Pool, kind: Any, name: str, instance: str, refused: str) -> None:
    with pytest.raises((BadInput, NotFound), match=f"^{refused}"):
        pause(pool, kind, name, instance=instance)


def test_what_is_not_paused_cannot_be_resumed(pool: Pool) -> None:
    with pytest.raises(NotFound, match="pause: label 'nightly' is not paused"):
        resume(pool, "label", "nightly")
