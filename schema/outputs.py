"""Output of jobs: chunks of bytes by offset, stored per attempt, up to `validation.MAX_OUTPUT_BYTES`."""

from collections.abc import Sequence
from dataclasses import dataclass

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.validation import MAX_OUTPUT_BYTES


@dataclass(frozen=True)
class Written:
    """A chunk of one attempt's output that a bot sent in a session; `start` is the offset of its first byte."""

    bot_id: int
    bot_epoch: int
    job: str
    fence: int
    start: int
    data: bytes


# Only the bot that holds the lease may write. A repeated chunk changes nothing, and a longer one replaces it. Rows are
# looked up one by one (OFFSET 0): a plan for any number of chunks would read all live leases.
APPEND = Statement("""
INSERT INTO job_outputs AS o (job_id, fence, start, data)
SELECT j.id, l.fence, c.start, c.data
FROM unnest(CAST(:bot_ids AS bigint[]), CAST(:epochs AS bigint[]), CAST(:jobs AS uuid[]), CAST(:fences AS bigint[]),
            CAST(:starts AS bigint[]), CAST(:chunks AS bytea[])) AS c (bot_id, bot_epoch, job, fence, start, data)
CROSS JOIN LATERAL (SELECT id FROM jobs WHERE public_id = c.job OFFSET 0) j
CROSS JOIN LATERAL (
    SELECT fence, bot_id, bot_epoch, state FROM leases WHERE job_id = j.id AND fence = c.fence OFFSET 0) l
WHERE l.bot_id = c.bot_id AND l.bot_epoch = c.bot_epoch AND l.state IN ('pending', 'active', 'cancelling')
ON CONFLICT (job_id, fence, start) DO UPDATE SET data = EXCLUDED.data
    WHERE length(EXCLUDED.data) > length(o.data)
RETURNING job_id
""")

READ = Statement("""
SELECT start, data FROM job_outputs
WHERE job_id = :job_id AND fence = :fence AND start + length(data) > :start AND start < :start + :limit
ORDER BY start
""")


def append(connection: Connection, chunks: Sequence[Written]) -> int:
    """Store chunks of live leases, without the bytes beyond the cap. Returns the number of chunks written."""
    kept: dict[tuple[int, int, str, int, int], bytes] = {}
    for chunk in chunks:
        data = chunk.data[: max(0, MAX_OUTPUT_BYTES - chunk.start)]
        place = (chunk.bot_id, chunk.bot_epoch, chunk.job, chunk.fence, chunk.start)
        if len(data) > len(kept.get(place, b"")):
            kept[place] = data
    if not kept:
        return 0
    places = sorted(kept)
    rows = connection.execute(
        APPEND,
        {
            "bot_ids": [place[0] for place in places],
            "epochs": [place[1] for place in places],
            "jobs": [place[2] for place in places],
            "fences": [place[3] for place in places],
            "starts": [place[4] for place in places],
            "chunks": [kept[place] for place in places],
        },
    )
    return len(rows.all())


def read(connection: Connection, job_id: int, *, fence: int, start: int, limit: int) -> bytes:
    """Contiguous bytes of one attempt from offset `start`, at most `limit` bytes. Stored chunks may overlap."""
    found = bytearray()
    where = {"job_id": job_id, "fence": fence, "start": start, "limit": limit}
    for row in connection.execute(READ, where):
        skip = start + len(found) - row.start
        if skip < 0:
            break
        found += row.data[skip:]
    return bytes(found[:limit])
