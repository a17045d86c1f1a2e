"""A job's row that is not sound is refused, by the name of what it breaks."""

import psycopg
import pytest
from sqlalchemy.exc import DBAPIError

from tests.pool import Pool

BROKEN = {
    "state = 'lost'": "jobs_finished_at_iff_final",
    "finished_at = now()": "jobs_finished_at_iff_final",
    "state = 'succeeded'": "jobs_finished_at_iff_final",
    "state = 'lost', finished_at = now()": "jobs_finished_at_iff_final",
    "state = 'running', schedule_after = now()": "jobs_backoff_only_waiting",
    "state = 'dead', finished_at = now(), schedule_after = now()": "jobs_backoff_only_waiting",
    "fence = -1": "jobs_fence_positive",
    "result_fence = 7": "jobs_result_is_current",
    "priority = 1001": "jobs_priority_range",
    "priority = -1001": "jobs_priority_range",
    "label = repeat('é', 33)": "jobs_label_bounded",
    "locality_hint = repeat('x', 201)": "jobs_locality_hint_bounded",
    "units = 0": "jobs_units_positive",
    "max_attempts = 0": "jobs_max_attempts_positive",
    "attempts = -1": "jobs_attempts_bounded",
    "attempts = max_attempts + 1": "jobs_attempts_bounded",
    "kills = 4": "jobs_kills_bounded",
    "evictions = -1": "jobs_evictions_positive",
    "dedup_key = ''": "jobs_dedup_key_bounded",
    "dedup_key = repeat('x', 201)": "jobs_dedup_key_bounded",
    "timeout_seconds = 0": "jobs_timeout_finite",
    "timeout_seconds = 'NaN'": "jobs_timeout_finite",
    "timeout_seconds = 'Infinity'": "jobs_timeout_finite",
}
SOUND = [
    "state = 'cancelled', finished_at = now()",
    "state = 'parked', schedule_after = now()",
    "fence = 7, result_fence = 7",
    "priority = -1000, label = repeat('é', 32), locality_hint = repeat('x', 200), dedup_key = repeat('x', 200)",
    "attempts = max_attempts, kills = 3, timeout_seconds = 31536000",
]


@pytest.mark.parametrize(("change", "name"), BROKEN.items())
def test_a_row_that_is_not_sound_is_refused(pool: Pool, change: str, name: str) -> None:
    (job,) = pool.submit()
    with pytest.raises(DBAPIError, match=f'row for relation "jobs" violates check constraint "{name}"') as refused:
        pool.change(f"UPDATE jobs SET {change}")
    assert isinstance(refused.value.orig, psycopg.errors.CheckViolation)
    assert refused.value.orig.diag.constraint_name == name
    assert pool.job(job).state == "queued"


def test_a_row_at_its_bounds_is_taken(pool: Pool) -> None:
    for change in SOUND:
        with pool.database.engine.connect() as connection:
            connection.exec_driver_sql("INSERT INTO jobs (instance, platform) VALUES (1, 1)")
            connection.exec_driver_sql(f"UPDATE jobs SET {change}")
            connection.rollback()
