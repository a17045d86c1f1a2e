"""One rate, four assigner processes: never above it by the times of the grants, and hardly below it."""

import random
from bisect import bisect_left

from schema import rates
from tests.assigners import assigner_processes
from tests.patience import eventually
from tests.pool import Pool

PROCESSES = 4
PER_SECOND, BURST = 50, 25
#: Jobs of the limited class, more than can start while the test looks, and of another one.
LIMITED, FREE = 4000, 300
SECONDS = 6.0
#: Part of the rate that has to be used, also on a machine that does much else.
USED = 0.3

GRANTED = """
SELECT extract(epoch FROM l.granted_at)::float AS at FROM leases l JOIN jobs j ON j.id = l.job_id
JOIN gatings g ON g.id = j.gating WHERE g.terms->>'resource_class' = :resource ORDER BY 1"""


def grants(pool: Pool, resource: str) -> list[float]:
    return [row.at for row in pool.rows(GRANTED, resource=resource)]


def test_ma_20_a_rate_shared_by_four_processes_is_kept_in_every_second_and_used(
    pool: Pool, database_url: str, chance: random.Random
) -> None:
    """interval is a second and more: nothing but the bucket itself can bring assigners back in time."""
    pool.database.run(lambda c: rates.set_rate(c, "claude_cli", per_second=PER_SECOND, burst=BURST, actor="test"))
    for nth in range(20):
        pool.bot(f"bot-{nth}", capacity=500)
    pool.submit(LIMITED, terms={"resource_class": "claude_cli"}, priority=-10)
    with assigner_processes(database_url, pool.timing, chance, [[None]] * PROCESSES):
        eventually(lambda: grants(pool, "claude_cli"))
        pool.submit(FREE, terms={"resource_class": "codex"})

        def over() -> bool:
            found = grants(pool, "claude_cli")
            return found[-1] - found[0] >= SECONDS and len(grants(pool, "codex")) == FREE

        eventually(over, every=0.25)
    found, free = grants(pool, "claude_cli"), grants(pool, "codex")

    most = max(bisect_left(found, at + 1.0) - nth for nth, at in enumerate(found))
    assert most <= PER_SECOND + BURST
    span = found[-1] - found[0] - 1.0
    used = (len(found) - bisect_left(found, found[0] + 1.0)) / (span * PER_SECOND)
    assert used >= USED
    assert len(found) < LIMITED, "jobs of another class do not wait for this one"
    print(f"{used:.1%} of the rate, at most {most} in a second; {FREE} others in {free[-1] - free[0]:.2f} s")
