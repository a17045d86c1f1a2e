"""Lists of jobs: every filter in every order, page by page, while other jobs come, start and end."""

import base64
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from leasehold.errors import BadInput

from assigner.queries import listing, metadata
from assigner.queries.listing import BOUNDS, Bounds, Request
from schema.filters import Direction, JobFilter, Sort
from schema.postgres.statements import Row
from tests.support.pool import Pool, active, completed
from tests.support.race import cancel, park

EXAMPLES_VARIABLE = "LEASEHOLD_TEST_EXAMPLES"
#: So little that every list walks, in many pages.
LITTLE = Bounds(few=5, examined=7, of_queue=7)
EVERYTHING = """
SELECT CAST(j.public_id AS text) AS id, j.id AS row_id, j.state, i.name AS instance, c.name AS cohort, j.label,
    j.priority, j.rank, j.created_at, j.queued_at, j.started_at, j.finished_at, p.properties, j.units,
    coalesce(s.terms, '{}') AS terms,
    CASE WHEN o.payload->'command'->>0 = 'leasehold-task' THEN o.payload->'command'->>2 END AS task,
    (SELECT coalesce(jsonb_object_agg(key, value), '{}') FROM job_metadata WHERE job_id = j.id) AS metadata,
    (SELECT b.name FROM leases l JOIN bots b ON b.id = l.bot_id
     WHERE l.job_id = j.id ORDER BY fence DESC LIMIT 1) AS bot
FROM jobs j JOIN instances i ON i.id = j.instance JOIN cohorts c ON c.id = j.cohort
JOIN platforms p ON p.id = j.platform JOIN job_payloads o ON o.job_id = j.id JOIN queues q ON q.id = j.queue
LEFT JOIN constraint_sets s ON s.id = q.constraint_set
"""
#: Sort → the key of a row in that order.
KEY: Mapping[Sort, Callable[[Any], tuple[Any, ...]]] = {
    Sort.SUBMITTED: lambda row: (row.row_id,),
    Sort.QUEUED: lambda row: (row.queued_at, row.row_id),
    Sort.STARTED: lambda row: (row.started_at, row.row_id),
    Sort.ENDED: lambda row: (row.finished_at, row.row_id),
    Sort.PRIORITY: lambda row: (row.rank, row.queued_at, row.row_id),
}
CALL = ["leasehold-task", "app:pool", "app.charge"]
#: Units of each bot: no bot could run a job that needs more.
BOTS_HAVE = 10
TIMES = {"submitted": "created_at", "queued": "queued_at", "started": "started_at", "ended": "finished_at"}


def fill(pool: Pool, chance: random.Random, jobs: int = 60) -> None:
    """Jobs of all kinds in all states but those of graphs."""
    for _ in range(jobs):
        terms = chance.choice([{}, {"job_class": "random"}, {"owner": "ann"}, {"owner": "bob", "project": "alpha"}])
        own = {"class": "random"} if "job_class" in terms else {}
        pool.submit(
            instance=chance.choice(["ci", "qa"]),
            units=chance.choice([1] * 5 + [BOTS_HAVE + 1]),
            label=chance.choice(["", "nightly", "weekly"]),
            payload={"command": chance.choice([["true"], ["echo", "a", "app.charge"], CALL])},
            properties=chance.choice([{}, {"os": "linux"}, {"os": ["linux", "bsd"], "gpu": "a"}]),
            metadata=chance.choice([{}, {"build": "1"}, {"build": "1", "target": "//a"}, {"build": "2"}]),
            **({"own": own} if own else {"priority": chance.randint(-2, 2)}),
            **({"terms": terms} if terms else {}),
        )
    ids = [row.id for row in pool.rows("SELECT public_id AS id FROM jobs")]
    chance.shuffle(ids)
    offered = {"os": ["linux", "bsd"], "gpu": ["a"]}
    for name in ("b1", "b2"):
        bot = pool.bot(name, capacity=BOTS_HAVE, properties=offered)
        pool.assigner().run_once()
        works = bot.take()
        half = len(works) // 2
        over = [completed(work, "failed" if nth % 2 else "succeeded") for nth, work in enumerate(works[:half])]
        bot.sync(*over, *map(active, works[half:]))
    some = [str(each) for each in ids[: jobs // 3]]
    cancel(pool, *some[::2])
    park(pool, *some[1::2])


def passes(row: Any, given: JobFilter) -> bool:
    """What the words of the filter say."""
    terms = {"job_class": given.job_class, "owner": given.owner, "project": given.project}
    same = {name: getattr(given, name) for name in ("instance", "cohort", "label", "task", "bot")}
    return all(
        (
            not given.state or row.state in given.state,
            all(value is None or getattr(row, name) == value for name, value in same.items()),
            all(value is None or row.terms.get(name) == value for name, value in terms.items()),
            all(row.metadata.get(pair.partition("=")[0]) == pair.partition("=")[2] for pair in given.metadata),
            all(pair.partition("=")[2] in row.properties.get(pair.partition("=")[0], ()) for pair in given.properties),
            not given.unmatchable or (row.state == "queued" and row.units > BOTS_HAVE),
            given.min_priority is None or row.priority >= given.min_priority,
            given.max_priority is None or row.priority <= given.max_priority,
            *(_within(getattr(row, column), given, name) for name, column in TIMES.items()),
        )
    )


def _within(at: datetime | None, given: JobFilter, name: str) -> bool:
    after, before = getattr(given, f"{name}_after"), getattr(given, f"{name}_before")
    if at is None:
        return after is None and before is None
    return (after is None or at >= after) and (before is None or at < before)


def expected(rows: Sequence[Row], given: JobFilter, sort: Sort, direction: Direction) -> list[str]:
    found = [row for row in rows if passes(row, given) and KEY[sort](row)[0] is not None]
    return [row.id for row in sorted(found, key=KEY[sort], reverse=direction is Direction.DESCENDING)]


def pages(
    pool: Pool,
    given: JobFilter,
    *,
    sort: Sort | None = None,
    direction: Direction | None = None,
    limit: int = 4,
    bounds: Bounds = BOUNDS,
    instances: list[str] | None = None,
) -> Iterator[list[str]]:
    cursor = None
    while True:
        request = Request.of(given, limit=limit, sort=sort, direction=direction, cursor=cursor)
        page = pool.database.run(lambda c, r=request: listing.page(c, r, instances=instances, bounds=bounds))  # type: ignore[misc]
        yield [str(job["id"]) for job in page.jobs]
        cursor = page.next
        if cursor is None:
            return


def walked(pool: Pool, given: JobFilter, **asked: Any) -> list[str]:
    return [job for page in pages(pool, given, **asked) for job in page]


def filters(rows: Sequence[Row], chance: random.Random) -> Iterator[JobFilter]:
    """Each filter alone, then mixtures."""
    times = sorted(at for row in rows for at in (row.created_at, row.started_at, row.finished_at) if at is not None)
    samples: dict[str, Sequence[Any]] = {
        "state": [["queued"], ["running"], ["parked"], ["failed", "succeeded"], ["queued", "parked", "running"]],
        "instance": ["ci", "qa", "absent"],
        "cohort": ["default", "absent"],
        "label": ["nightly", ""],
        "task": ["app.charge", "app.absent"],
        "metadata": [["build=1"], ["build=1", "target=//a"], ["build=3"]],
        "properties": [["os=linux"], ["os=bsd", "gpu=a"], ["os=plan9"]],
        "job_class": ["random"],
        "owner": ["ann", "bob"],
        "project": ["alpha"],
        "unmatchable": [True],
        "bot": ["b1", "b2", "absent"],
        "min_priority": [0],
        "max_priority": [-1],
        **{f"{name}_{side}": times[:: len(times) // 3] for name in TIMES for side in ("after", "before")},
    }
    assert samples.keys() == JobFilter.model_fields.keys()
    for name, values in samples.items():
        for value in values:
            yield JobFilter(**{name: value})
    for _ in range(15):
        names = chance.sample(sorted(samples), chance.randint(2, 3))
        yield JobFilter(**{name: chance.choice(samples[name]) for name in names})


@pytest.mark.parametrize("bounds", [BOUNDS, LITTLE], ids=["few", "walks"])
def test_the_pages_of_every_filter_hold_what_it_says_in_the_asked_order(
    pool: Pool, chance: random.Random, bounds: Bounds
) -> None:
    """`LEASEHOLD_TEST_EXAMPLES=1` looks at every filter in each order."""
    fill(pool, chance)
    rows = pool.rows(EVERYTHING)
    assert {row.state for row in rows} >= {"queued", "parked", "running", "succeeded", "failed", "cancelled"}
    refused: set[tuple[str, Sort]] = set()
    for given in filters(rows, chance):
        for sort in Sort if os.environ.get(EXAMPLES_VARIABLE) else chance.sample([*Sort], 2):
            direction = chance.choice(list(Direction))
            wanted = expected(rows, given, sort, direction)
            try:
                found = walked(pool, given, sort=sort, direction=direction, bounds=bounds, limit=chance.randint(1, 9))
            except BadInput as error:
                refused.add((error.field, sort))
                continue
            assert (given, sort, direction, found) == (given, sort, direction, wanted)
    unindexed = {("sort", sort) for sort in (Sort.QUEUED, Sort.STARTED, Sort.PRIORITY)}
    assert refused == (unindexed if bounds is LITTLE else set())


def test_no_filter_lists_the_newest_first_and_the_end_in_a_filter_sorts_by_the_end(pool: Pool) -> None:
    jobs = [job for _ in range(7) for job in pool.submit()]
    assert [*pages(pool, JobFilter(), limit=3)] == [jobs[:3:-1], jobs[3:0:-1], jobs[:1]]
    for job in (jobs[1], jobs[2], jobs[0]):
        cancel(pool, job)
    since = pool.row("SELECT min(created_at) AS at FROM jobs").at
    assert walked(pool, JobFilter(ended_after=since)) == [jobs[0], jobs[2], jobs[1]]


@pytest.mark.parametrize("bounds", [BOUNDS, LITTLE], ids=["few", "walks"])
@pytest.mark.parametrize("given", [{}, {"metadata": ["build=1"]}, {"state": ["queued"], "label": "nightly"}])
def test_jobs_that_come_and_end_between_pages_neither_shift_nor_repeat_the_others(
    pool: Pool, chance: random.Random, bounds: Bounds, given: dict[str, Any]
) -> None:
    fields = {"metadata": {"build": "1"}, "label": "nightly"}
    jobs = pool.submit(25, **fields)
    over = chance.sample(jobs, 6)
    found: list[str] = []
    for page in pages(pool, JobFilter(**given), limit=3, bounds=bounds):
        found += page
        pool.submit(2, **fields)
        if over:
            cancel(pool, over.pop())
    kept = {str(row.public_id) for row in pool.rows("SELECT public_id FROM jobs WHERE state = 'queued'")}
    wanted = [job for job in reversed(jobs) if job in kept]
    assert [job for job in found if job in wanted] == wanted
    assert len(found) == len(set(found))
    assert set(found) <= set(jobs), "what came later is no part of a list from the newest to the oldest"


def test_a_caller_lists_only_jobs_of_its_instances(pool: Pool) -> None:
    (mine,) = pool.submit(instance="ci", metadata={"build": "1"})
    pool.submit(instance="qa", metadata={"build": "1"})
    for given in ({}, {"metadata": ["build=1"]}, {"state": ["queued"]}, {"instance": "ci"}):
        for bounds in (BOUNDS, Bounds(0, 1, 1)):
            assert walked(pool, JobFilter(**given), instances=["ci"], bounds=bounds) == [mine]
    assert walked(pool, JobFilter(instance="qa"), instances=["ci"]) == []
    assert walked(pool, JobFilter(), instances=[]) == []


def test_a_job_is_listed_for_each_build_that_shares_it_as_that_builds_submission(pool: Pool) -> None:
    """So what a build cancels by its metadata is its own."""
    shared: dict[str, Any] = {"dedup_key": "same", "instance": "ci"}
    builds = [{"build": "1"}, {"build": "2", "target": "//a"}, {"build": "2"}]
    first, second, again = (pool.submit(**shared, metadata=build)[0] for build in builds)
    for bounds in (BOUNDS, Bounds(0, 1, 1)):
        for given, expected in (("build=1", [first]), ("build=2", [min(second, again)]), ("target=//a", [second])):
            assert walked(pool, JobFilter(metadata=[given]), instances=["ci"], bounds=bounds) == expected
    cancel(pool, second)
    assert walked(pool, JobFilter(metadata=["build=2"]), instances=["ci"]) == [again]
    told = pool.database.run(
        lambda c: metadata.summary(c, {"build": "2", "target": "//a"}, instances=None, instance=None)
    )
    assert told["jobs"] == {"queued": 1}
    values = pool.database.run(
        lambda c: metadata.values(c, "build", contains=None, after=None, limit=9, instances=None, instance=None)
    )
    assert values == (["1", "2"], None)


def test_a_cursor_belongs_to_one_list(pool: Pool) -> None:
    pool.submit(3)

    def page(cursor: str | None, **asked: Any) -> listing.Page:
        request = Request.of(JobFilter(**asked.pop("filters", {})), limit=1, cursor=cursor, **asked)
        return pool.database.run(lambda c: listing.page(c, request, instances=None))

    cursor = page(None).next
    assert cursor is not None
    assert page(cursor).next is not None
    others: list[dict[str, Any]] = [{"filters": {"state": ["queued"]}}, {"before": 3}]
    others += [{"sort": Sort.QUEUED}, {"direction": Direction.ASCENDING}]
    for other in others:
        with pytest.raises(BadInput) as refused:
            page(cursor, **other)
        assert refused.value.field == "cursor"
    digest, nonce, _ = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    keys = [[nonce, True], [nonce, 1.5], [nonce, "1"], [nonce, 1 << 63], [3, 1], [None, 1], [1]]
    made = [base64.urlsafe_b64encode(json.dumps([digest, *key]).encode()).decode() for key in keys]
    cut = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    made += [base64.urlsafe_b64encode(json.dumps([*cut[:-1], cut[-1] ^ 1 << bit]).encode()).decode() for bit in (0, 9)]
    for bad in ("", "x", "é", cursor[:-4], cursor[::-1], "W10", "MQ", "eyJhIjoxfQ", *made):
        with pytest.raises(BadInput) as refused:
            page(bad)
        assert refused.value.field == "cursor"


def test_cursors_do_not_tell_how_many_jobs_the_pool_has_made(pool: Pool) -> None:
    def cursor(sort: Sort) -> tuple[str, list[Any]]:
        request = Request.of(JobFilter(), limit=1, sort=sort)
        told = pool.database.run(lambda c: listing.page(c, request, instances=None)).next
        assert told is not None
        return told, json.loads(base64.urlsafe_b64decode(told + "=" * (-len(told) % 4)))

    pool.submit(3)
    bot = pool.bot(capacity=3)
    pool.assigner().run_once()
    bot.sync(*(completed(lease) for lease in bot.take()))
    for sort in Sort:
        (told, first), (again, second) = cursor(sort), cursor(sort)
        assert told != again
        assert first[2:-1] == second[2:-1]
        for numbers in (first, second):
            assert numbers[-1] > 1_000_000, "an id is hidden by as many random bits as it may have"


def test_times_leave_nothing_out_up_to_the_ends_of_the_calendar(pool: Pool) -> None:
    jobs = [job for _ in range(9) for job in pool.submit()]
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    for bounds in (BOUNDS, LITTLE):
        assert walked(pool, JobFilter(submitted_after=first, submitted_before=last), bounds=bounds) == jobs[::-1]
        assert walked(pool, JobFilter(submitted_after=last), bounds=bounds) == []
        assert walked(pool, JobFilter(queued_before=first), bounds=bounds) == []
