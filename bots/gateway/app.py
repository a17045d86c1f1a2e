"""The gateway's application: it joins routes, middleware, long polls and workers, and holds no state of the pool."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio.to_thread
import psycopg
from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bots.gateway import middleware, problems, routes
from bots.gateway.held_calls import HeldSessions, NewestCalls
from bots.gateway.identity.bearers import SignedTokens, TokenCache
from bots.gateway.long_poll import LongPolls
from bots.gateway.metrics import MEDIA_TYPE, GatewayMetrics
from bots.gateway.middleware import (
    ANYONE,
    KINDS,
    BodyReader,
    RequestMiddleware,
    RouteRules,
    route_rules,
)
from bots.gateway.settings import GatewaySettings
from bots.gateway.workers import Batcher, SessionOpener, worker_pools
from bots.sync.call import Call, HeldCall
from bots.sync.settle import SyncService
from schema.postgres import migrate
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.failures import describe_outage, find_exhausted, is_outage
from schema.postgres.notify import Wakeups
from schema.postgres.standby import StandbyReads
from schema.postgres.statements import Statement
from schema.timing import Timing

#: Seconds within which the database must answer, or the gateway reports that it is not ready.
READY_SECONDS = 1.0

# The row is never kept, but its transaction commits, and so waits for the disk and for synchronous standbys.
WRITE = Statement("INSERT INTO write_probes DEFAULT VALUES")
# A row may find room in a file that exists. What does not fit into memory needs new room on the disk, and no table
# grows by it.
LITTLE_MEMORY = Statement("SET LOCAL work_mem = '64kB'")
SPILL = Statement("SELECT count(*) FROM generate_series(1, 5000)")

_OPEN = {KINDS: [ANYONE]}

health_router = APIRouter(tags=["gateway"])


@health_router.get("/healthz", openapi_extra=_OPEN)
async def healthz() -> dict[str, str]:
    """Answer that the process is alive."""
    return {"status": "ok"}


@health_router.get("/readyz", responses=problems.documented(), openapi_extra=_OPEN)
async def readyz(request: Request) -> Response:
    """Answer 200 if the database takes writes within a second and has the schema that this version needs, and none of
    the gateway's loops, `presence` and `standby`, stands still."""
    state = request.app.state
    standing = state.standing()
    found = f"loops of this process stand still: {', '.join(standing)}" if standing else await state.probe.trouble()
    if found:
        return problems.problem(503, found, headers={"Retry-After": problems.RETRY_AFTER})
    return JSONResponse({"status": "ready", "wakeups_connected": bool(_connected(state.wakeups))})


@health_router.get("/metrics", openapi_extra=_OPEN, response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the gateway's metrics in Prometheus' text format."""
    return Response(request.app.state.metrics.text(), media_type=MEDIA_TYPE)


class Probe:
    """Checks whether the database can be read and written. Requests share one check, so that a hanging one blocks one
    thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pending_check: asyncio.Task[str] | None = None

    async def trouble(self) -> str:
        """Return why the database cannot be used, or "" if it can; takes at most READY_SECONDS."""
        if self._pending_check is None or self._pending_check.done():
            self._pending_check = asyncio.create_task(anyio.to_thread.run_sync(self._check))
        try:
            async with asyncio.timeout(READY_SECONDS):
                return await asyncio.shield(self._pending_check)
        except TimeoutError:
            return f"the database did not answer within {READY_SECONDS:.0f} s"

    def _check(self) -> str:
        for last in (False, True):
            try:
                return self._database.run(_read_and_write, urgent=True, repeat=False)
            except psycopg.Error as error:
                # The first try may have found a connection that was lost while nobody used it.
                if last or not is_outage(error):
                    return _describe(error)
        raise AssertionError("the last try returns")


def _read_and_write(connection: Connection) -> str:
    """Return what is wrong with the database, "" if it has the right schema and can be written."""
    if trouble := migrate.read(connection).trouble:
        return trouble
    with connection.savepoint() as undone:
        connection.execute(WRITE)
        undone.rollback()
    connection.execute(LITTLE_MEMORY)
    connection.execute(SPILL)
    return ""


def _describe(error: psycopg.Error) -> str:
    if exhausted := find_exhausted(error):
        return f"the database has no {exhausted} left"
    return describe_outage(error) if is_outage(error) else "the database cannot be written"


class Application(FastAPI):
    """A FastAPI application behind RequestMiddleware.

    Its OpenAPI document also describes request bodies, problem documents and which routes need a token.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.state.request_middleware(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        """Leave out the outermost part, which answers unexpected errors in plain text: `RequestMiddleware` answers."""
        stack = super().build_middleware_stack()
        assert isinstance(stack, ServerErrorMiddleware)
        return stack.app

    async def inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run FastAPI itself, after the middleware has admitted the request."""
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            described = super().openapi()
            middleware.describe_bodies(described, self.state.readers)
            parts = described.setdefault("components", {})
            parts.setdefault("schemas", {})["Problem"] = problems.Problem.model_json_schema()
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "lh_…"}}
            for operations in described["paths"].values():
                for operation in operations.values():
                    if operation.get(KINDS) != [ANYONE]:
                        operation["security"] = [{"token": []}]
            self.openapi_schema = described
        return self.openapi_schema


def build(
    database: Database,
    sync_service: SyncService,
    settings: GatewaySettings,
    *,
    timing: Timing,
    wakeups: Wakeups | None = None,
    routers: Sequence[APIRouter] = (),
    estimate: Callable[[Mapping[str, Any]], float] | None = None,
    default_level: str | None = None,
    advise: Callable[[Sequence[Mapping[str, Any]]], Mapping[int, str]] | None = None,
    standby: StandbyReads | None = None,
    signed: SignedTokens | None = None,
) -> FastAPI:
    """Build the application.

    wakeups: without it, long polls learn of news only every `timing.poll` seconds.
    routers: the routes for callers and operators. A route without `x-kinds` is closed to all.
    estimate: computes the expected cost of a job whose request does not name one.
    default_level: service level of jobs that name neither a level nor a class.
    advise: returns advice on the run times that requests state, by index; None = no advice.
    standby: where lists and reports are read; None = on the primary.
    signed: verifies tokens of other issuers; None = there are none.

    Handlers find in `app.state`: run (work in a transaction, on a thread), read (such work that writes nothing and may
    see an older state), polls (long polls by topic), timing, max_wait (seconds), database, and what is given here.
    """
    counted = GatewayMetrics()
    pools = worker_pools(database, queue=settings.queue)
    polls = LongPolls(wakeups=wakeups, poll=timing.poll, metrics=counted)
    held_sessions = HeldSessions(database, pools.bots, ttl=timing.ttl, metrics=counted)
    opener = SessionOpener(database, pools.bots, queue=settings.queue, timing=timing, tracer=sync_service.tracer)

    def queue() -> float:
        return pools.callers.slots.taken + pools.bots.slots.taken + opener.slots.taken

    counted.watch(queue=queue, connected=lambda: _connected(wakeups), standby=standby)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            held_sessions.close()
            await polls.close()

    parts = [routes.router, health_router, *routers]
    # The routes as they are: an included router builds each of them once more, all while a first request waits. And a
    # redirect would lead to the host that the request names, with the token.
    own = [route for router in parts for route in router.routes]
    app = Application(
        title="Leasehold", version="1", lifespan=lifespan, routes=own, redirect_slashes=False, docs_url=None,
        redoc_url=None,
    )  # fmt: skip
    problems.install(app)
    rules = route_rules(parts, max_body=settings.max_body)
    app.state.readers = _readers(rules)
    cache = TokenCache(seconds=settings.token_cache_seconds, signed=signed)
    app.state.request_middleware = RequestMiddleware(
        app.inside, entries=rules, token_cache=cache, worker_pools=pools, metrics=counted
    )
    app.state.database, app.state.sync_service = database, sync_service
    app.state.timing, app.state.wakeups, app.state.opener, app.state.standing = timing, wakeups, opener, list[str]
    app.state.bots, app.state.callers, app.state.run = pools.bots, pools.callers, pools.callers.run
    app.state.read, app.state.standby = partial(pools.callers.run, on=standby), standby
    app.state.polls, app.state.metrics, app.state.held_sessions = polls, counted, held_sessions
    app.state.newest_calls = NewestCalls()
    app.state.batches = Batcher[Call, bytes | HeldCall](
        sync_service.answer, pools.bots, observe=counted.batches.observe
    )
    app.state.max_wait, app.state.probe = settings.max_wait, Probe(database)
    app.state.estimate, app.state.default_level, app.state.advise = estimate, default_level, advise
    return app


def _readers(rules: Iterable[RouteRules]) -> dict[tuple[str, str], BodyReader]:
    return {(rule.path, method): rule.reader for rule in rules for method in rule.methods if rule.reader is not None}


def _connected(wakeups: Wakeups | None) -> float:
    return float(wakeups is not None and wakeups.connected)
