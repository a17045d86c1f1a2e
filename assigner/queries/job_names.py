"""What people may say instead of a job's id: the short form that lists show, and the words @last and @failed.

A name is looked up among the jobs that the caller may see, by the indexes that are there for other reasons. A short
form says in which 65.5 s an id was made, and the unique index of the ids has these next to each other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from leasehold.errors import BadInput, NotFound
from leasehold.wire import escaped

from assigner.queries.jobs import VISIBLE
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.readable import FAILED, LAST, LEAST_END, NAMES_OF_JOBS, SHORT_ID

#: The first four digits of the time come again after 50 days: how many such spans back a short form is looked up.
SPANS = 8
#: How many of the newest jobs, or of the jobs that ended last, are looked at for a word.
NEWEST = 100_000
#: The most jobs that are told to somebody whose short form stands for several.
TOLD = 5

# Only the index is read for the jobs of these moments, and the rows of those whose ids end so.
FIND = Statement(f"""
WITH moments AS MATERIALIZED (
    SELECT lpad(to_hex(span - k), 4, '0') || digits AS digits
    FROM unnest(CAST(:minutes AS text[])) AS m (digits) CROSS JOIN generate_series(0, CAST(:spans AS bigint)) k
    CROSS JOIN (SELECT (date_part('epoch', clock_timestamp()) * 1000)::bigint >> 32 AS span) now
    WHERE span >= k
), found AS MATERIALIZED (
    SELECT j.public_id FROM moments m CROSS JOIN LATERAL (
        SELECT public_id FROM jobs
        WHERE public_id >= CAST(m.digits || '-0000-7000-8000-000000000000' AS uuid)
            AND public_id <= CAST(m.digits || '-ffff-7fff-bfff-ffffffffffff' AS uuid)
            AND right(CAST(public_id AS text), {LEAST_END}) = ANY (CAST(:ends AS text[]))
        ORDER BY public_id OFFSET 0) j
)
SELECT CAST(f.public_id AS text) AS id
FROM found f CROSS JOIN LATERAL (SELECT instance FROM jobs WHERE public_id = f.public_id OFFSET 0) j
JOIN instances i ON i.id = j.instance
WHERE {VISIBLE} ORDER BY 1
""")

# These read the jobs one by one and stop at the first that fits, so a word costs little unless it stands for nothing.
_BY_ACTOR = """
    :actor = (SELECT coalesce(p.submitted_by, (
            SELECT actor FROM stored_events WHERE job_id = j.id AND move = 'submit' LIMIT 1))
        FROM job_payloads p WHERE p.job_id = j.id)"""
_SEEN = f"j.instance = ANY (ARRAY(SELECT i.id FROM instances i WHERE {VISIBLE}))"
_NEWEST = "(SELECT id, public_id, instance, created_at, dedup_key FROM jobs ORDER BY id DESC LIMIT :newest) j"
# The newest submission of the actor: a job that it made, or one that it joined by a deduplication key.
NEWEST_SUBMISSION = Statement(f"""
SELECT CAST(public_id AS text) AS id FROM (
    (SELECT j.public_id, j.created_at FROM {_NEWEST} WHERE {_SEEN} AND {_BY_ACTOR} ORDER BY j.id DESC LIMIT 1)
    UNION ALL
    (SELECT f.public_id, f.created_at FROM {_NEWEST} JOIN job_followers f ON f.job_id = j.id AND f.actor = :actor
     WHERE (SELECT count(*) FROM (SELECT FROM job_followers LIMIT 1) joined) > 0 AND j.dedup_key IS NOT NULL AND {_SEEN}
     ORDER BY f.created_at DESC LIMIT 1)) found
ORDER BY created_at DESC LIMIT 1
""")
# Of the jobs that the actor made, the one that failed last.
_ENDED = """
    (SELECT id, public_id, instance, finished_at FROM jobs
     WHERE state = '{}' AND finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT :newest)"""
NEWEST_FAILURE = Statement(f"""
SELECT CAST(j.public_id AS text) AS id FROM ({_ENDED.format("failed")} UNION ALL {_ENDED.format("dead")}) j
WHERE {_SEEN} AND {_BY_ACTOR} ORDER BY j.finished_at DESC LIMIT 1
""")
_WORDS: Mapping[str, tuple[Statement, str]] = {
    LAST: (NEWEST_SUBMISSION, "submitted"),
    FAILED: (NEWEST_FAILURE, "submitted and that has failed"),
}


def find(
    connection: Connection, names: Sequence[str], *, instances: Sequence[str] | None, actor: str
) -> dict[str, str]:
    """Return the ids that the names stand for.

    instances: what the caller may see; None = all. actor: whose jobs @last and @failed are. Raises BadInput for a text
    that is no such name and for a short form of several jobs, NotFound for one of none.
    """
    short = {name: found for name in names if (found := SHORT_ID.fullmatch(name.lower()))}
    ids: Sequence[str] = ()
    if short:
        values: dict[str, Any] = {
            "minutes": sorted({found[1] for found in short.values()}),
            "ends": sorted({found[2][-LEAST_END:] for found in short.values()}),
        }
        ids = connection.execute(FIND, values | {"spans": SPANS, "instances": instances}).scalars().all()
    answer = {}
    for name in dict.fromkeys(names):
        if name in _WORDS:
            answer[name] = _by_word(connection, name, instances=instances, actor=actor)
        elif name in short:
            minute, end = short[name].groups()
            answer[name] = _only(name, [each for each in ids if each[4:8] == minute and each.endswith(end)])
        else:
            raise BadInput("id", f"'{escaped(name, 80)}' is not the id of a job: {NAMES_OF_JOBS}")
    return answer


# The newest graph of the actor, and the newest with a node that failed or died.
_GRAPHS = f"""
SELECT g.id, CAST(g.public_id AS text) AS public_id FROM (SELECT * FROM graphs ORDER BY id DESC LIMIT :newest) g
WHERE g.actor = :actor AND g.instance = ANY (ARRAY(SELECT i.id FROM instances i WHERE {VISIBLE})) {{}}
ORDER BY g.id DESC LIMIT 1"""
_WORDS_OF_GRAPHS: Mapping[str, Statement] = {
    LAST: Statement(_GRAPHS.format("")),
    FAILED: Statement(
        _GRAPHS.format("""
        AND EXISTS (SELECT FROM graph_nodes n WHERE n.graph = g.id AND n.outcome IN ('failed', 'dead'))""")
    ),
}


def find_graph(
    connection: Connection, name: str, *, instances: Sequence[str] | None, actor: str
) -> tuple[int, str] | None:
    """Return the row id and the id of the graph that @last or @failed stands for; None if the name is no such word.

    Raises NotFound for a word that stands for none.
    """
    if name not in _WORDS_OF_GRAPHS:
        return None
    values = {"newest": NEWEST, "instances": instances, "actor": actor}
    found = connection.execute(_WORDS_OF_GRAPHS[name], values).one_or_none()
    if found is None:
        done = {LAST: "submitted", FAILED: "submitted and that has a failed node"}[name]
        raise NotFound(f"id: {name}: there is no graph that this token has {done}")
    return found.id, found.public_id


def _by_word(connection: Connection, word: str, *, instances: Sequence[str] | None, actor: str) -> str:
    query, done = _WORDS[word]
    values = {"newest": NEWEST, "instances": instances, "actor": actor}
    found: str | None = connection.execute(query, values).scalar_one_or_none()
    if found is None:
        raise NotFound(f"id: {word}: of the newest {NEWEST:,} jobs there is none that this token has {done}")
    return found


def _only(name: str, ids: Sequence[str]) -> str:
    if not ids:
        raise NotFound(f"id: there is no job '{name}'")
    if len(ids) > 1:
        more = "" if len(ids) <= TOLD else f" and {len(ids) - TOLD} more"
        raise BadInput("id", f"'{name}' is short for {len(ids)} jobs: {', '.join(ids[:TOLD])}{more}")
    return ids[0]
