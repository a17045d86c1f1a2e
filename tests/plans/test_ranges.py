"""What happened lately is found by the range of an index, however much happened before."""

from collections.abc import Callable

import pytest

from schema.accounting import counters
from schema.policy import canaries
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from tests.support.plans import watching
from tests.support.pool import Pool

ROWS = 300
#: Name → the table, and what looks at what is new in it or old enough.
LOOKS: dict[str, tuple[str, Callable[[Connection], object]]] = {
    "what ended lately, of a trial": ("jobs", lambda c: canaries.count(c, "instance", [1], seconds=60.0)),
    "usage that leaves the window": ("usage", lambda c: counters.roll(c, window=3600.0, limit=100)),
}


@pytest.mark.breaks_invariants
@pytest.mark.parametrize("name", LOOKS)
def test_what_is_outside_of_the_time_is_not_read(pool: Pool, name: str) -> None:
    table, look = LOOKS[name]
    pool.submit(ROWS)
    pool.change("UPDATE jobs SET state = 'cancelled', finished_at = now() - interval '1 day'")
    pool.change(
        "INSERT INTO usage (name, bucket, amount)"
        " SELECT 'instance:default:cost', date_trunc('minute', now()) - make_interval(mins => n % 50), 1"
        f" FROM generate_series(1, {ROWS}) n ON CONFLICT DO NOTHING"
    )
    with pool.database.connect() as connection, watching(connection) as seen:
        connection.execute(Statement("SET LOCAL auto_explain.log_nested_statements = on"))
        look(connection)
    touched = [node.touched for plan in seen.plans for node in plan.nodes if node.relation == table]
    assert touched
    assert sum(touched) < 10, seen.plans
