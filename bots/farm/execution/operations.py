"""ListOperations: the submissions of the door that a caller may see, by a filter, the newest jobs first."""

import base64
import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.longrunning.operations_proto_pb2 import ListOperationsRequest, ListOperationsResponse, Operation
from leasehold.errors import BadInput
from leasehold.states import JobState
from leasehold.wire import escaped

from bots.farm.execution.endings import Endings
from bots.farm.execution.jobs import OWN, Found, News
from bots.farm.execution.outcome import STAGES
from bots.farm.execution.streams import operation
from bots.farm.identity import DoorCaller, Identity
from bots.farm.protos import remote_execution_pb2
from bots.farm.settings import METADATA
from bots.farm.storage.upstream import parsed
from bots.gateway.workers import WorkerPool
from schema.postgres.connection import Connection
from schema.postgres.fragments import DESCRIBED, WITHDRAWN_SUBMISSIONS
from schema.postgres.statements import Row, Statement

#: Operations of a page: unless a caller says how many, and at most.
USUAL, MOST = 100, 1000
#: Bytes of the operations of a page. One with its result has at most 3 MiB, and clients of gRPC take 4 MiB by default.
MOST_BYTES = 3 * 1024 * 1024
#: Operations whose results are read together.
TOGETHER = 20
#: Jobs that one page looks at: other people's jobs may lie between those of the door.
EXAMINED = 20_000
_TERM = re.compile(r"""\s*(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|(\S+))\s*(?:AND\b|$)""")

_DESCRIBED = f"""j.id = ANY (ARRAY(
    SELECT d.job_id FROM instances i JOIN {DESCRIBED} d ON d.instance = i.id AND d.key = :key AND d.value = :value
    WHERE CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[]))))"""
_HAS = "EXISTS (SELECT FROM {} d WHERE d.{} = {} AND d.key = :key AND d.value = :value OFFSET 0)"
# A page goes on after a submission, by its job first: followers of a job come one after another.
_PAGE = """
WITH seen AS MATERIALIZED (
    SELECT j.* FROM jobs j WHERE {few} AND (CAST(:job AS uuid) IS NULL OR j.public_id <= CAST(:job AS uuid))
    ORDER BY j.public_id DESC LIMIT :examined
), own AS MATERIALIZED (
    SELECT j.*, i.name AS of FROM seen j JOIN instances i ON i.id = j.instance JOIN platforms p ON p.id = j.platform
    JOIN job_payloads w ON w.job_id = j.id
    WHERE {own} AND (CAST(:instances AS text[]) IS NULL OR i.name = ANY (CAST(:instances AS text[])))
), found AS (
    SELECT j.public_id AS job, s.id AS submission FROM own j CROSS JOIN LATERAL (
        SELECT j.public_id AS id, j.abandoned_at AS withdrawn_at WHERE {job_has}
        UNION ALL SELECT f.public_id, f.cancelled_at FROM job_followers f WHERE f.job_id = j.id AND {follower_has}) s
    WHERE (CAST(:job AS uuid) IS NULL OR (j.public_id, s.id) < (CAST(:job AS uuid), CAST(:submission AS uuid)))
        AND CASE WHEN s.withdrawn_at IS NULL THEN j.state ELSE 'cancelled' END = ANY (CAST(:states AS text[]))
    ORDER BY j.public_id DESC, s.id DESC LIMIT :most
)
SELECT f.job, f.submission, j.of AS instance, j.state, j.queued_at, {withdrawn} AS withdrawn, last.bot, e.last, e.looked
FROM (SELECT min(CAST(public_id AS text)) AS last, count(*) AS looked FROM seen) e
LEFT JOIN (found f JOIN own j ON j.public_id = f.job) ON true
LEFT JOIN LATERAL (
    SELECT b.name AS bot FROM leases l JOIN bots b ON b.id = l.bot_id
    WHERE l.job_id = j.id ORDER BY l.fence DESC LIMIT 1) last ON true
ORDER BY f.job DESC NULLS LAST, f.submission DESC
"""


def _page(*, described: bool) -> Statement:
    return Statement(
        _PAGE.format(
            own=OWN,
            few=_DESCRIBED if described else "true",
            job_has=_HAS.format("job_metadata", "job_id", "j.id") if described else "true",
            follower_has=_HAS.format("submission_metadata", "submission", "f.public_id") if described else "true",
            withdrawn=WITHDRAWN_SUBMISSIONS,
        )
    )


ALL, DESCRIBED_ONES = (_page(described=described) for described in (False, True))
#: The first possible submission of a job, after which only other jobs come.
_NONE = uuid.UUID(int=0)


@dataclass(frozen=True)
class Filter:
    """What operations must have: a stage, and a value of one key of metadata.

    It is written `stage = EXECUTING AND invocation = ID`; `done = true` is the stage COMPLETED.
    """

    states: Sequence[str] = tuple(state.value for state in JobState)
    described: tuple[str, str] | None = None

    @classmethod
    def parse(cls, text: str) -> "Filter":
        """Read a filter, which may be empty. Raises BadInput."""
        if "\0" in text:
            raise BadInput("filter", "holds a NUL character")
        states, described, at = set(JobState), None, 0
        while at < len(text.rstrip()):
            term = _TERM.match(text, at)
            if term is None:
                raise BadInput("filter", f"'{escaped(text[at:], 80)}' is not NAME = VALUE [AND …]")
            name, value = term[1], next(each for each in term.groups()[1:] if each is not None)
            at = term.end()
            if name == "done" and value in ("true", "false"):
                states &= _of_stage("COMPLETED") if value == "true" else states - _of_stage("COMPLETED")
            elif name == "stage" and value in remote_execution_pb2.ExecutionStage.Value.keys():  # noqa: SIM118 - it is no mapping
                states &= _of_stage(value)
            elif name in METADATA and described is None:
                described = (name, value)
            else:
                known = (
                    f"done = true or false, stage = QUEUED, EXECUTING or COMPLETED, and one of {', '.join(METADATA)}"
                )
                raise BadInput("filter", f"'{escaped(term[0].strip(), 80)}': known are {known}")
        return cls(tuple(sorted(state.value for state in states)), described)


def _of_stage(name: str) -> set[JobState]:
    wanted = remote_execution_pb2.ExecutionStage.Value.Value(name)
    return {state for state, stage in STAGES.items() if stage == wanted}


async def answer(
    request: bytes, caller: DoorCaller, *, identity: Identity, workers: WorkerPool, endings: Endings
) -> bytes:
    """Answer ListOperations. Raises BadInput, and Forbidden for another instance."""
    asked = parsed(ListOperationsRequest, request, "request")
    name = f"/{asked.name}".removesuffix("/").removesuffix("/operations").removeprefix("/")
    instances = [identity.instance(caller, name)] if name else caller.instances
    most = min(asked.page_size or USUAL, MOST)
    if most < 0:
        raise BadInput("page_size", "must not be negative")
    wanted, after = Filter.parse(asked.filter), _after(asked.page_token)
    rows = await workers.run(partial(_read, wanted=wanted, after=after, instances=instances, most=most + 1))
    found = [row for row in rows if row.job is not None][:most]
    answer = ListOperationsResponse()
    answer.operations.extend([each async for each in _fitting(found, endings)])
    answer.next_page_token = _following(rows, found[: len(answer.operations)])
    data: bytes = answer.SerializeToString()
    return data


async def _fitting(rows: Sequence[Row], endings: Endings) -> AsyncIterator[Operation]:
    """Yield the operations of these rows, but not more than fit into an answer. Always yields the first."""
    size = 0
    for first in range(0, len(rows), TOGETHER):
        some = rows[first : first + TOGETHER]
        news = {row.job: _news(row) for row in some}
        responses = await endings.told([str(job) for job, each in news.items() if each.is_final])
        for row in some:
            of = Found(str(row.submission), str(row.job), row.instance)
            made = operation(of, news[row.job], responses.get(of.job))
            size += made.ByteSize()
            if size > MOST_BYTES and size > made.ByteSize():
                return
            yield made


def _read(
    connection: Connection,
    *,
    wanted: Filter,
    after: tuple[str, str] | None,
    instances: Sequence[str] | None,
    most: int,
) -> Sequence[Row]:
    job, submission = after or (None, None)
    values: Mapping[str, Any] = {"job": job, "submission": submission, "states": list(wanted.states)}
    values = {**values, "instances": instances, "most": most, "examined": EXAMINED}
    if wanted.described is None:
        return connection.execute(ALL, values).all()
    key, value = wanted.described
    return connection.execute(DESCRIBED_ONES, {**values, "key": key, "value": value}).all()


def _news(row: Row) -> News:
    return News(JobState(row.state), row.queued_at, row.withdrawn or {}, row.bot)


def _after(token: str) -> tuple[str, str] | None:
    """The job and the submission after which a page begins; None for the first page. Raises BadInput."""
    if not token:
        return None
    try:
        data = base64.urlsafe_b64decode(token)
        return str(uuid.UUID(bytes=data[:16])), str(uuid.UUID(bytes=data[16:]))
    except ValueError:
        raise BadInput("page_token", "is not that of an earlier page") from None


def _following(rows: Sequence[Row], found: Sequence[Row]) -> str:
    """The token of the next page; empty if there is none."""
    if len([row for row in rows if row.job is not None]) > len(found):
        last = [found[-1].job, found[-1].submission]
    else:
        last = [rows[0].last, _NONE] if rows[0].looked == EXAMINED else []
    return base64.urlsafe_b64encode(b"".join(uuid.UUID(str(each)).bytes for each in last)).decode()
