"""The gateway's middleware: it checks token, permission and body of a request before a handler runs.

It verifies the bearer token, checks that this kind of token may use the route (by default it may not), checks type and
size of the body, and parses it. A refusal needs no database, except for a token that is not in the cache.

A handler names the type of its body by the annotation of its parameter `body`, and receives the parsed body from
`request.state`. FastAPI would parse it a second time, on the event loop. The middleware parses a body on a thread,
unless the body is small and its handler bypasses the framework.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from fastapi import APIRouter
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from leasehold import wire
from leasehold.errors import MAX_TOLD, BadInput, Forbidden, LeaseholdError, NotReady, Unauthorised
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bots.gateway import problems
from bots.gateway.identity.bearers import TokenCache
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.workers import Busy, WorkerPools
from schema import clock, validation
from schema.fields import misspelt
from schema.tenancy.tokens import Kind, Principal

# Bodies


#: A body that does not match the route's model. Holds the first error, or that of each of the first refused jobs.
Invalid = RequestValidationError


class BodyReader:
    """Parses the request bodies of one route."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model

    def read(self, raw: bytes) -> BaseModel:
        """Parse these bytes into the route's model; may compute for a second.

        Raises BadInput if they are not strict JSON, Invalid if they do not match the model.
        """
        document = validation.parse_json(raw)
        try:
            return self.model.model_validate(document, from_attributes=True)
        except ValidationError as error:
            each_error = getattr(self.model, "each_error", None)
            found = [] if each_error is None else each_error(document)
            found = found or error.errors(include_url=False, include_input=False, include_context=False)[:1]
            told = [self._placed(each) for each in found[:MAX_TOLD]]
            raise Invalid([*told, *found[MAX_TOLD:]]) from None  # of these only the number is told

    def _placed(self, error: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**error, "loc": ("body", *error["loc"]), "msg": error["msg"] + misspelt(self.model, error)}


#: A path parameter with its converter, such as `{id:path}`; an OpenAPI document names only the parameter.
_CONVERTED = re.compile(r"\{(\w+):\w+\}")


def body_reader(endpoint: Callable[..., Any]) -> BodyReader | None:
    """Return the reader for this handler's parameter `body`; None if the handler takes no body."""
    model = get_type_hints(endpoint).get("body")
    return None if model is None else BodyReader(model)


def describe_bodies(document: dict[str, Any], readers: Mapping[tuple[str, str], BodyReader]) -> None:
    """Add the request bodies of routes, by path and method, to an OpenAPI document."""
    models: Sequence[tuple[type[BaseModel], Any]] = [(one.model, "validation") for one in readers.values()]
    references, defined = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in defined["$defs"].items():
        schemas.setdefault(name, schema)
    for (path, method), one in readers.items():
        content = {"application/json": {"schema": references[one.model, "validation"]}}
        document["paths"][_CONVERTED.sub(r"{\1}", path)][method.lower()]["requestBody"] = {
            "required": True,
            "content": content,
        }


# Tokens and routes


#: Key of a route's `openapi_extra`: the kinds of tokens that may use the route; `["anyone"]` needs no token.
KINDS = "x-kinds"
#: Key of a route's `openapi_extra`: the largest body in bytes; unset = the gateway's `max_body`.
MAX_BODY = "x-max-body"
ANYONE = "anyone"

#: Bodies up to this size, in bytes, are parsed on the event loop if the handler bypasses the framework: that takes less
#: time than a thread.
SMALL = 4096


#: A handler that the middleware can call itself: with the request, its body and its caller.
Handler = Callable[[Request, Any, Principal], Awaitable[Response]]

_bypassing: set[Callable[..., Any]] = set()


def bypass_framework(handler: Handler) -> Handler:
    """Mark a route's handler so that the middleware calls it directly instead of FastAPI.

    FastAPI would double the time of a sync call, and its memory while the call is held. Errors are answered in the
    same way as those of other handlers.
    """
    _bypassing.add(handler)
    return handler


@dataclass(frozen=True)
class RouteRules:
    """The middleware's rules for one route.

    kinds: None = open to all; empty = closed to all. queries: the parameters of the query. max_body: bytes.
    reader: None = the route takes no body. handler: None = FastAPI calls the handler.
    """

    path: str
    pattern: re.Pattern[str]
    methods: frozenset[str]
    kinds: frozenset[Kind] | None
    queries: frozenset[str]
    max_body: int
    reader: BodyReader | None
    handler: Handler | None


def route_rules(routers: Iterable[APIRouter], *, max_body: int) -> list[RouteRules]:
    """Build the rules for the routes of these routers. A route without `x-kinds` is closed."""
    found = []
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                extra: dict[str, Any] = route.openapi_extra or {}
                kinds = extra.get(KINDS, [])
                found.append(
                    RouteRules(
                        path=route.path,
                        pattern=route.path_regex,
                        methods=frozenset(route.methods or ()),
                        kinds=None if kinds == [ANYONE] else frozenset(Kind(kind) for kind in kinds),
                        queries=frozenset(_queries(route.dependant)),
                        max_body=min(max_body, extra.get(MAX_BODY, max_body)),
                        reader=body_reader(route.endpoint),
                        handler=route.endpoint if route.endpoint in _bypassing else None,
                    )
                )
    return found


def _queries(dependant: Dependant) -> Iterator[str]:
    """Give the names of the parameters of the query that a handler and its dependencies take."""
    for parameter in dependant.query_params:
        model = parameter.field_info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            yield from (field.alias or name for name, field in model.model_fields.items())
        else:
            yield parameter.alias
    for each in dependant.dependencies:
        yield from _queries(each)


class RequestMiddleware:
    """The ASGI middleware. It also counts requests, and answers every error with a problem document."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        entries: Sequence[RouteRules],
        token_cache: TokenCache,
        worker_pools: WorkerPools,
        metrics: GatewayMetrics,
    ) -> None:
        self._app, self._entries, self._token_cache = app, entries, token_cache
        self._worker_pools, self._metrics = worker_pools, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = _StatusRecorder(send)
        started = clock.monotonic()
        route, admitted = "unmatched", False
        try:
            entry = self._entry(scope)
            if entry is not None:
                route = entry.path
                await self._admit(scope, receive, entry)
            admitted = True
            if entry is None or entry.handler is None:
                await self._app(scope, receive, answered.send)
            else:
                state = scope["state"]
                answer = await entry.handler(Request(scope, receive), state["body"], state["principal"])
                await answer(scope, receive, answered.send)
        except Exception as error:
            trouble = problems.from_error(error)
            if trouble is None:
                self._metrics.failures.inc()
                trouble = problems.unexpected(error, route=route)
            elif not admitted:
                self._metrics.refused.labels(_reason(error)).inc()
            # The server closes the connection of an answer that has begun and does not end. If it got the error, it
            # would log its text, which may be PostgreSQL's.
            if not answered.status:
                await trouble(scope, receive, answered.send)
        except asyncio.CancelledError:
            # The gateway stops and waits no longer. uvicorn would answer in plain text.
            if not answered.status:
                await problems.interrupted()(scope, receive, answered.send)
        finally:
            self._metrics.requests.labels(route, f"{answered.status // 100}xx").inc()
            self._metrics.seconds.labels(route).observe(clock.monotonic() - started)

    def _entry(self, scope: Scope) -> RouteRules | None:
        for entry in self._entries:
            if scope["method"] in entry.methods and entry.pattern.match(scope["path"]):
                return entry
        return None

    async def _admit(self, scope: Scope, receive: Receive, entry: RouteRules) -> None:
        workers = self._worker_pools.bots if entry.kinds == frozenset({Kind.BOT}) else self._worker_pools.callers
        if entry.kinds is not None:
            principal = await self._token_cache.principal(_headers(scope, b"authorization"), workers)
            if principal.kind not in entry.kinds:
                raise Forbidden(f"a token of kind {principal.kind} may not use this")
            scope.setdefault("state", {})["principal"] = principal
        _check_address(scope, entry)
        reader = entry.reader
        if reader is None:
            return
        if workers.slots.full:
            raise Busy("the gateway has too much to do")
        raw = await _collected(scope, receive, entry.max_body)
        self._metrics.bodies.labels(entry.path).observe(len(raw))
        at_once = entry.handler is not None and len(raw) <= SMALL
        scope.setdefault("state", {})["body"] = (
            reader.read(raw) if at_once else await workers.read(lambda: reader.read(raw))
        )


class _StatusRecorder:
    """Passes messages on and remembers the answer's status, which is 0 until the answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _check_address(scope: Scope, entry: RouteRules) -> None:
    """Raise BadInput for a parameter of the query that the route does not know, or one with a NUL character.

    No text in PostgreSQL holds a NUL. It is the only character to refuse: bytes that are no text have been replaced
    when the address was decoded. Routes that are open to all take any query: probes of other makers add to it.
    """
    given: list[tuple[str, str]] = []
    if "\x00" in scope["path"] and (found := entry.pattern.match(scope["path"])) is not None:
        given += found.groupdict().items()
    if scope["query_string"]:
        query = QueryParams(scope["query_string"])
        given += query.multi_items()
        unknown = [] if entry.kinds is None else [name for name in query if name not in entry.queries]
        if unknown:
            told = [_no_such_field(each, entry.queries) for each in unknown[:MAX_TOLD]]
            raise BadInput.of(told, more=len(unknown) - len(told))
    for name, value in given:
        if "\x00" in value:
            raise BadInput(wire.escaped(name, 60), "holds a NUL character")


def _no_such_field(name: str, known: Iterable[str]) -> BadInput:
    return BadInput(wire.escaped(name, 60) or "query", f"there is no such field{wire.suggestion(name, known)}")


def _headers(scope: Scope, name: bytes) -> list[str]:
    """Return the values of a header, whose name is in lower case here and in the scope."""
    return [value.decode("latin-1") for each, value in scope["headers"] if each == name]


async def _collected(scope: Scope, receive: Receive, limit: int) -> bytes:
    kind, *parameters = [part.strip().lower() for part in "".join(_headers(scope, b"content-type")[:1]).split(";")]
    if kind != "application/json" or any(p.startswith("charset=") and "utf-8" not in p for p in parameters):
        raise problems.Refused(415, "must be sent as application/json in UTF-8", field="content-type")
    if _headers(scope, b"content-encoding")[:1] not in ([], ["identity"]):
        raise problems.Refused(415, "must not be compressed", field="content-encoding")
    return await _collect(receive, limit)


async def _collect(receive: Receive, limit: int) -> bytes:
    """Read the whole body; drop a body that is too long while it arrives, so that its sender reads the answer."""
    kept = bytearray()
    size = 0
    more = True
    while more and size <= 4 * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise problems.Refused(400, "ended before it was complete")
        size += len(message.get("body", b""))
        if size <= limit:
            kept += message.get("body", b"")
        else:
            kept.clear()
        more = message.get("more_body", False)
    if size > limit:
        raise problems.Refused(413, f"is larger than {limit} bytes")
    return bytes(kept)


def _reason(error: Exception) -> str:
    match error:
        case Busy():
            return "busy"
        case Unauthorised() | Forbidden() | NotReady():
            return type(error).__name__.lower()
        case BadInput() | Invalid() | problems.Refused():
            return "bad_body"
        case LeaseholdError():
            return "refused"
        case _:
            return "database"
