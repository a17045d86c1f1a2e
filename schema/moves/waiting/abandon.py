"""Submissions that count only while somebody watches them: they are withdrawn when nobody has for a while.

A job goes on as long as another submission of it counts, as after any other cancellation.
"""

from collections.abc import Collection, Sequence

from schema.accounting.held_rows import move_rows
from schema.moves import cancel
from schema.moves.cancel import Cancelled
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

# Sorted, so that two processes that watch the same submissions do not lock each other.
_WATCH = Statement("""
INSERT INTO submission_watches (submission, watched_until)
SELECT id, now() + make_interval(secs => :seconds)
FROM unnest(CAST(:submissions AS uuid[])) AS id ORDER BY id
ON CONFLICT (submission)
DO UPDATE SET watched_until = greatest(submission_watches.watched_until, excluded.watched_until)
""")
_FORGET = Statement("""
DELETE FROM submission_watches WHERE submission IN (
    SELECT submission FROM submission_watches WHERE submission = ANY (CAST(:submissions AS uuid[]))
    ORDER BY submission FOR UPDATE)
""")
# What another process is writing, or withdraws already, is left to it.
_ABANDONED = Statement("""
SELECT submission FROM submission_watches WHERE watched_until < now()
ORDER BY watched_until LIMIT :most FOR UPDATE SKIP LOCKED
""")


def watch(connection: Connection, submissions: Collection[str], *, seconds: float) -> None:
    """Let these submissions, by their UUIDs, count for `seconds` more at least."""
    connection.execute(_WATCH, {"submissions": list(submissions), "seconds": seconds})


def forget(connection: Connection, submissions: Collection[str]) -> None:
    """Watch these submissions no more, and let them count."""
    connection.execute(_FORGET, {"submissions": list(submissions)})


def withdraw(connection: Connection, *, most: int, sync: float, actor: str, tries: bool = False) -> list[Cancelled]:
    """Cancel submissions that nobody has watched in time, at most so many, the longest first.

    sync: the bots' sync period, seconds. One that has ended, or is not kept any more, is only forgotten. tries: what
    cannot be cancelled now is left: its job or another row that it needs is held, or wrong.
    """

    def end(among: Sequence[str]) -> list[Cancelled]:
        forget(connection, among)
        return cancel.cancel(connection, among, instances=None, sync=sync, actor=actor)

    found = [str(row.submission) for row in connection.execute(_ABANDONED, {"most": most})]
    parts = move_rows(connection, found, end, tries=tries)
    return [each for part in parts for each in part if each.changed]
