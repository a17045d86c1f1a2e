"""The routes of results: the JSON that commands leave."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from leasehold import wire
from leasehold.errors import NotFound
from leasehold.states import FINAL
from pydantic import Field
from starlette.responses import Response

from assigner.api import models, routing
from assigner.api.routing import CALLERS, IDS, Caller, JobId, Read, problems
from assigner.api.submission import RequestModel
from assigner.queries import jobs as job_queries
from schema.postgres.connection import Connection
from schema.validation import MAX_RESULT_BYTES

#: Bytes of results in one answer. Doubling it doubles the memory that a request may take.
MAX_ANSWER_BYTES = 8 * 1024 * 1024


class ResultsRequest(RequestModel):
    ids: list[str] = Field(min_length=1, max_length=wire.MAX_LIST)


router = APIRouter(prefix="/v1", tags=["callers"])


@router.get("/jobs/{id}/result", response_model=models.ResultAnswer, responses=problems(404), openapi_extra=CALLERS)
async def result(request: Request, id: JobId, caller: Caller) -> Response:
    """Return the result that a job's command left. 404 also if it left none, or if the job is not final."""

    def work(connection: Connection) -> str:
        asked = routing.job_id(id)
        found = job_queries.results(connection, [asked], instances=caller.instances, room=MAX_RESULT_BYTES).get(asked)
        if found is None:
            raise routing.not_found(id)
        if found["fence"] is None:
            why = _without(connection, asked, caller) if found["state"] in FINAL else "has not ended"
            raise NotFound(f"id: job '{asked}' has no result: it is {found['state']} and {why}")
        routing.audit_access(connection, caller, "result.read", subject=asked)
        return _document({"fence": found["fence"]}, found["result"])

    return _answer(await request.app.state.run(work, kept_plans=True))


def _without(connection: Connection, job: str, caller: Caller) -> str:
    """Return why no result is stored of a job that has ended: what its bot said of a file that could be none."""
    found = job_queries.submission_states(connection, [job], instances=caller.instances).get(job) or {}
    reason = str((found.get("result") or {}).get("reason") or "")
    return reason[reason.find(wire.NO_RESULT) :] if wire.NO_RESULT in reason else "none is stored"


@router.post(
    "/results", response_model=models.ResultsAnswer, responses=problems(400, 404, 408, 413, 415), openapi_extra=IDS
)
async def results(request: Request, body: Annotated[ResultsRequest, Read], caller: Caller) -> Response:
    """Return states of jobs; of those that are final also exit code, reason and result. 404 names an unknown id.

    An answer has at most 8 MiB of results. If those of all jobs are larger, it is on the first of them, and has `more`.
    """

    def work(connection: Connection) -> str:
        ids = list(dict.fromkeys(routing.job_id(given) for given in body.ids))
        found = job_queries.results(connection, ids, instances=caller.instances, room=MAX_ANSWER_BYTES)
        for given in ids:
            if given not in found:
                raise routing.not_found(given)
        routing.audit_access(connection, caller, "results.read", subject=ids[0], details={"jobs": len(ids)})
        fitting = [each for each in found.values() if each["fits"]]
        more = "true" if len(fitting) < len(found) else "false"
        return f'{{"jobs":[{",".join(map(_described, fitting))}],"more":{more}}}'

    return _answer(await request.app.state.run(work, kept_plans=True))


def _described(row: Mapping[str, Any]) -> str:
    told = {name: row[name] for name in ("state", "exit_code", "reason")}
    return _document({"id": str(row["id"]), **told, "has_result": row["fence"] is not None}, row["result"])


def _document(fields: Mapping[str, Any], result: str | None) -> str:
    """Return a JSON object of these fields and the result, whose text is taken as the command wrote it."""
    return f'{json.dumps(fields)[:-1]}, "result": {"null" if result is None else result}}}'


def _answer(document: str) -> Response:
    return Response(document, media_type="application/json")
