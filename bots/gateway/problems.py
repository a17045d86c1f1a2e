"""Error answers as `application/problem+json`: what each of them says.

An answer never holds SQL, a traceback, or PostgreSQL's DETAIL. The log holds an id, the kind of error and where it
was raised, but no message of the database, which may quote a payload.
"""

import secrets
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from leasehold import wire
from leasehold.errors import MAX_TOLD, BadInput, Conflict, Forbidden, LeaseholdError, NotFound, NotReady, Unauthorised
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from schema.fields import plain
from schema.postgres.failures import describe_outage, find_exhausted, is_conflict, is_outage
from schema.validation import RENAMED

MEDIA_TYPE = "application/problem+json"
#: Seconds after which a client may repeat a request that was answered with 503.
RETRY_AFTER = "1"
#: A statement ran into `statement_timeout`, or an administrator cancelled it.
_CANCELLED = "57014"

_log = structlog.get_logger(__name__)


class RefusedField(BaseModel):
    field: str = Field(description="the path of a refused value")
    detail: str


class Problem(BaseModel):
    """A problem document (RFC 9457). `field`: the path of the refused value. `code`: a stable word for programs."""

    type: str = Field(description="urn:leasehold:<what happened>")
    title: str
    status: int
    detail: str
    field: str | None = None
    code: str | None = None
    errors: list[RefusedField] | None = Field(
        default=None, description="if several jobs are refused: the first error of each of them, at most 10"
    )
    more: int | None = Field(default=None, description="how many further jobs or nodes are refused, beside `errors`")


class Refused(LeaseholdError):
    """The gateway refused a request because of its form. `status`: the HTTP status of the answer."""

    def __init__(self, status: int, reason: str, *, field: str = "body") -> None:
        super().__init__(f"{field}: {reason}")
        self.status = status
        self.field = field


_TITLES = {
    400: "bad input",
    401: "unauthorised",
    403: "forbidden",
    404: "not found",
    405: "method not allowed",
    408: "request timeout",
    409: "conflict",
    413: "body too large",
    415: "unsupported media type",
    422: "bad input",
    431: "header too large",
    500: "internal error",
    503: "not ready",
}


def problem(
    status: int,
    detail: str,
    *,
    field: str | None = None,
    code: str | None = None,
    errors: Sequence[tuple[str, str]] = (),
    more: int = 0,
    headers: dict[str, str] | None = None,
) -> Response:
    """Make a response with one problem document. errors: each refused field with its detail, if there are several.

    more: how many further ones there are.
    """
    title = _TITLES.get(status, "error")
    body: dict[str, Any] = {
        "type": f"urn:leasehold:{code or title.replace(' ', '-')}",
        "title": title,
        "status": status,
        "detail": detail,
    }
    if field is not None:
        body["field"] = field
    if code is not None:
        body["code"] = code
    if len(errors) > 1:
        body["errors"] = [{"field": each, "detail": said} for each, said in errors]
    if more:
        body["more"] = more
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def from_error(error: BaseException) -> Response | None:
    """Return the answer to an error that is meant for the client; None for any other error."""
    detail = str(error)
    match error:
        case BadInput():
            told = [(each.field, str(each)) for each in (error, *error.others)]
            return problem(400, detail, field=error.field, errors=told, more=error.more)
        case Refused():
            headers = {"Connection": "close"} if error.status == 413 else None
            return problem(error.status, detail, field=error.field, headers=headers)
        case Unauthorised():
            return problem(401, detail, headers={"WWW-Authenticate": 'Bearer realm="leasehold"'})
        case Forbidden():
            return problem(403, detail)
        case NotFound():
            return problem(404, detail)
        case Conflict():
            return problem(409, detail, code=error.code)
        case NotReady():
            return _retry_later(detail, getattr(error, "code", None))
        case RequestValidationError():
            return _invalid(error.errors())
        case HTTPException():
            headers = dict(error.headers) if error.headers else None
            return problem(error.status_code, _TITLES.get(error.status_code, "refused"), headers=headers)
        case psycopg.Error():
            return _database(error)
        case LeaseholdError():
            return problem(400, detail)
        case _:
            return None


def unexpected(error: BaseException, *, route: str) -> Response:
    """Log an unexpected error and return an answer that names only the log entry."""
    identity = secrets.token_hex(6)
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    _log.error(
        "a request failed",
        error_id=identity,
        route=route,
        kind=type(error).__name__,
        sqlstate=getattr(error, "sqlstate", None),
        where=[f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
    )
    return problem(500, f"the gateway failed; its log has the reason under {identity}", code=identity)


def interrupted() -> Response:
    """Make the answer to a request that the gateway gave up because it stops."""
    return _retry_later("the gateway stops, and the outcome of the request is unknown", "outcome_unknown")


def install(app: FastAPI) -> None:
    """Answer every known error of the app's handlers with a problem document; the middleware answers the others."""

    async def handle(_: Request, error: Exception) -> Response:
        answer = from_error(error)
        if answer is None:
            raise error
        return answer

    for kind in (LeaseholdError, RequestValidationError, HTTPException, psycopg.Error):
        app.add_exception_handler(kind, handle)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe these problem answers, and those that any route may give, for OpenAPI."""
    schema = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": _TITLES[status].capitalize(), "content": schema}
        for status in sorted({400, 401, 403, 422, 500, 503, *statuses})
    }


def field_of(location: Sequence[int | str]) -> str:
    """Return the dotted path of a value in a body or query, as the client wrote it."""
    parts = [str(part) for part in location if part not in ("query", "path", "header")]
    if parts[:1] == ["body"] and len(parts) > 1:
        parts = parts[1:]
    return wire.escaped(".".join(parts) or "body")


def _invalid(errors: Sequence[Any]) -> Response:
    told = [_refusal(each) for each in errors[:MAX_TOLD]]
    field, detail = told[0]
    return problem(422, detail, field=field, errors=told, more=max(0, len(errors) - MAX_TOLD))


def _refusal(error: Mapping[str, Any]) -> tuple[str, str]:
    field = field_of(error["loc"])
    said = RENAMED.get(str(error["loc"][-1])) if error["type"] == "extra_forbidden" else None
    reason = said or wire.escaped(plain(str(error["msg"])))
    return field, f"{field}: {reason}"


def _database(error: psycopg.Error) -> Response | None:
    if is_outage(error):
        return _retry_later(describe_outage(error), None)
    if exhausted := find_exhausted(error):
        return _retry_later(f"the database has no {exhausted} left", "exhausted")
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return _retry_later(
            "somebody holds a lock on rows of the pool; operators: `leasehold db doctor` names who", "busy"
        )
    if is_conflict(error) or error.sqlstate == _CANCELLED:
        return _retry_later("the database is too busy", "busy")
    return None


def _retry_later(detail: str, code: str | None) -> Response:
    return problem(503, detail, code=code, headers={"Retry-After": RETRY_AFTER})
