"""Lists, summaries and values read by indexes, and no more than their bounds, however many jobs there are."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from leasehold.errors import BadInput

from assigner.queries import jobs as job_queries
from assigner.queries import listing
from assigner.queries import metadata as metadata_queries
from assigner.queries.listing import Bounds, Request
from schema.filters import JobFilter, Sort
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from tests.support import filling
from tests.support.plans import Watch, filled, watching
from tests.support.servers import Databases

JOBS, QUEUED, HELD, BUILDS = 12_000, 4_000, 300, 500
#: A twentieth of what production allows, so that a list cannot stay within them by luck.
BOUNDS = Bounds(few=500, examined=500, of_queue=50)
LIMIT = 20
KINDS = ("full", "absent")
TABLES = ("jobs", "job_metadata", "stored_events", "job_payloads", "leases", "queues")
#: Jobs came during a day, each with an id of its time, and ended in the order of their ids, a second apart.
SPREAD = (
    "UPDATE jobs SET created_at = now() - interval '1 day' + id * interval '3 s'",
    """UPDATE jobs SET queued_at = created_at, public_id = (lpad(to_hex((extract(epoch FROM created_at) * 1000)::bigint
            * 16 + 7), 13, '0') || substr(gen_random_uuid()::text, 16))::uuid""",
    "UPDATE jobs SET started_at = created_at, finished_at = created_at + interval '1 s' WHERE state = 'succeeded'",
    "UPDATE jobs SET label = 'rare' WHERE id % 1000 = 0",
    """UPDATE job_payloads SET payload = '{"command": ["leasehold-task", "app:pool", "app.rare"]}'
        WHERE job_id % 1000 = 0""",
    """INSERT INTO job_metadata (job_id, instance, key, value)
        SELECT id, instance, k.key, k.value FROM jobs
        CROSS JOIN LATERAL (VALUES ('build', (id % 500)::text), ('common', 'yes')) k (key, value)""",
    "ANALYZE",
)
NOON = datetime.now(UTC) - timedelta(hours=12)
FILTERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "state queued": {"state": ["queued"]},
    "state running": {"state": ["running"]},
    "state succeeded": {"state": ["succeeded"]},
    "state parked": {"state": ["parked"]},
    "states that are not final": {"state": ["blocked", "queued", "parked", "deferred", "leased", "running"]},
    "instance": {"instance": "i-1"},
    "absent instance": {"instance": "absent"},
    "cohort": {"cohort": "default"},
    "label": {"label": "rare"},
    "label of queued jobs": {"label": "rare", "state": ["queued"]},
    "task": {"task": "app.rare"},
    "task of queued jobs": {"task": "app.rare", "state": ["queued"]},
    "absent task": {"task": "app.absent"},
    "metadata": {"metadata": ["build=7"]},
    "common metadata": {"metadata": ["common=yes"]},
    "two metadata": {"metadata": ["common=yes", "build=7"]},
    "absent metadata": {"metadata": ["build=none"]},
    "properties": {"properties": ["kind=full"]},
    "class": {"job_class": "random"},
    "owner": {"owner": "ann"},
    "project": {"project": "alpha"},
    "bot": {"bot": "full-1"},
    "running on a bot": {"bot": "full-1", "state": ["running"]},
    "unmatchable": {"unmatchable": True},
    "priority": {"min_priority": 10, "max_priority": 10},
    **{f"{name} {side}": {f"{name}_{side}": NOON} for name in listing.TIMES for side in ("after", "before")},
    "an hour of ends": {"ended_after": NOON, "ended_before": NOON + timedelta(minutes=5)},
}
#: What one page may read: names, the bounds of each of its few statements, and the rows of the page in seven tables.
MOST = 8 * BOUNDS.examined + 12 * LIMIT


@pytest.fixture(scope="module")
def full(databases: Databases, template: str) -> Iterator[Database]:
    with filled(databases, template, TABLES) as database:
        database.run(_fill)
        yield database


def _fill(connection: Connection) -> None:
    filling.fill_queues(connection, instances=3, kinds=KINDS)
    filling.fill_jobs(connection, JOBS, instances=3, kinds=KINDS, state="succeeded")
    filling.fill_jobs(connection, QUEUED, instances=3, kinds=KINDS)
    filling.fill_bots(connection, {"full": HELD})
    filling.occupy(connection, "full", leaving=0)
    for statement in SPREAD:
        connection.execute(Statement(statement))


def listed(database: Database, given: JobFilter, sort: Sort, cursor: str | None = None) -> tuple[Watch, listing.Page]:
    request = Request.of(given, sort=sort, limit=LIMIT, cursor=cursor)
    with database.connect() as connection:
        with watching(connection) as watch:
            page = listing.page(connection, request, instances=None, bounds=BOUNDS)
        connection.rollback()
    return watch, page


@pytest.mark.parametrize("sort", Sort)
@pytest.mark.parametrize("name", FILTERS)
def test_a_page_of_any_filter_and_order_keeps_bounds(
    full: Database, name: str, sort: Sort, chance: random.Random
) -> None:
    given, cursor = JobFilter(**FILTERS[name]), None
    for _ in range(3):
        try:
            watch, page = listed(full, given, sort, cursor)
        except BadInput:
            if sort in (Sort.SUBMITTED, Sort.ENDED):
                raise
            return
        assert watch.whole_scans() <= {"platforms", "instances", "cohorts", "queues", "bots"}, f"{name}:\n{watch}"
        assert watch.touched <= MOST, f"{name}:\n{watch}"
        cursor = page.next
        if cursor is None:
            return


@pytest.mark.parametrize(
    ("name", "sort", "index"),
    [
        ("nothing", Sort.SUBMITTED, "jobs_pkey"),
        ("state succeeded", Sort.ENDED, "jobs_finished"),
        ("an hour of ends", Sort.ENDED, "jobs_finished"),
        ("state queued", Sort.PRIORITY, "jobs_of_queue"),
        ("unmatchable", Sort.PRIORITY, "jobs_of_queue"),
        ("state running", Sort.STARTED, "leases_one_live_per_job"),
        ("running on a bot", Sort.SUBMITTED, "leases_live_of_bot"),
        ("state parked", Sort.PRIORITY, "jobs_parked"),
        ("label of queued jobs", Sort.QUEUED, "jobs_waiting_label"),
        ("metadata", Sort.PRIORITY, "job_metadata_of_value"),
        ("common metadata", Sort.SUBMITTED, "job_metadata_of_value"),
        ("submitted after", Sort.SUBMITTED, "jobs_public_id_key"),
        ("started before", Sort.SUBMITTED, "jobs_public_id_key"),
    ],
)
def test_a_filter_is_read_by_its_index(full: Database, name: str, sort: Sort, index: str) -> None:
    watch, _ = listed(full, JobFilter(**FILTERS[name]), sort)
    assert index in watch.indexes(), watch


def test_a_summary_and_a_page_of_values_read_what_has_the_value(full: Database) -> None:
    with full.connect() as connection:
        with watching(connection) as watch:
            found = metadata_queries.summary(connection, {"build": "7"}, instances=None, instance=None)
        with watching(connection) as looked:
            values, _ = metadata_queries.values(
                connection, "build", contains=None, after=None, limit=1000, instances=None, instance=None
            )
        with watching(connection) as named:
            everywhere = job_queries.waiting_labels(connection, instances=None)
            assert job_queries.waiting_labels(connection, instances=["absent"]) == []
        connection.rollback()
    assert "rare" in everywhere
    assert not named.whole_scans() & {"jobs"}
    assert named.touched <= 20 * len(everywhere), named
    assert "job_metadata_of_value" in watch.indexes() & looked.indexes()
    assert not (watch.whole_scans() | looked.whole_scans()) & {"jobs", "job_metadata", "leases"}
    assert watch.touched <= 20 * sum(found["jobs"].values()), watch
    assert len(values) == BUILDS
    assert looked.touched <= 10 * 3 * BUILDS, looked
