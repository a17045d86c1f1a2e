"""What upkeep does about jobs that wait: promotes those that starve, hastens those that are due, tells what will be
late."""

from collections import Counter

import structlog

from assigner import metrics
from schema import moves
from schema.engine import Database

#: Jobs that one transaction looks at, and such transactions in one round.
LIMIT, BATCHES = 500, 10

log = structlog.get_logger()


def watch(database: Database, *, actor: str) -> Counter[str]:
    """Look at the waiting jobs that are due for it; returns how many were promoted, hastened and found at risk."""
    done: Counter[str] = Counter()
    for _ in range(BATCHES):
        looked, warned = database.run(lambda connection: moves.watch(connection, LIMIT, actor=actor))
        for each in warned:
            done[each.move] += 1
            if each.move == "promote":
                log.info("promoted due to age", job=each.public_id, now=each.level)
            elif each.move == "at_risk":
                log.warning("a job will miss its deadline", job=each.public_id)
        if looked < LIMIT:
            break
    for move, count in done.items():
        metrics.WATCHED.labels(move=move).inc(count)
    return done
