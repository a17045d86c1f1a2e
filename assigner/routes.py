"""What the callers' and operators' routes share: who may use them, who calls, the body, and how refusals are told."""

from typing import Annotated, Any

from fastapi import Depends, Path, Request

from schema.limits import MAX_REASON
from schema.tokens import Principal

MAX_REASON_BYTES = MAX_REASON

# What a route's `openapi_extra` tells the gateway's door.
CALLERS: dict[str, Any] = {"x-kinds": ["submitter", "operator"]}
OPERATORS: dict[str, Any] = {"x-kinds": ["operator"], "x-max-body": 64 * 1024}
IDS: dict[str, Any] = CALLERS | {"x-max-body": 1024 * 1024}
OPERATORS_IDS: dict[str, Any] = OPERATORS | {"x-max-body": 1024 * 1024}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of these problem answers, beside those that any route may give."""
    schema = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    codes = sorted({401, 403, 422, 500, 503, *statuses})
    return {status: {"description": "a problem document", "content": schema} for status in codes}


async def _principal(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


async def _body(request: Request) -> Any:
    return request.state.body


Caller = Annotated[Principal, Depends(_principal)]
#: The body, which the door has read.
Read = Depends(_body)
JobId = Annotated[str, Path(max_length=200)]
