"""Opening the sessions of bots."""

import hashlib
import secrets
from collections.abc import Sequence
from functools import partial

from leasehold.errors import BadInput
from leasehold.wire import escaped

from bots.protocol import OpenSession, Session
from schema.diagnostics.tracing import AttemptTracer
from schema.fleet.kinds import TASK
from schema.moves import sessions
from schema.moves.sessions import OpenedSession, SessionOpening
from schema.policy.new_instances import refusal, refused_instances
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.failures import HINDRANCES
from schema.timing import Timing
from schema.validation import FARM, normal_properties


def digest(secret: str) -> bytes:
    """What is stored of a session's secret."""
    return hashlib.sha256(secret.encode()).digest()


def open_sessions(
    database: Database, requests: Sequence[OpenSession], *, timing: Timing, tracer: AttemptTracer | None = None
) -> list[Session | BadInput]:
    """Open sessions of different bots in one transaction; returns a session or an error for each request.

    Properties that break the limits, exclusive ones that are not there, and an instance that is not there and that bots
    may not make, are errors. An older session of the same bot ends, and its jobs are queued again. They are not granted
    before that session would have expired, unless the request says that it is dead. A lost bot does not count against
    them if it says that it was only cut off. A repeated request with the bot's own secret finds the session that it
    opened. `tracer` is told of the attempts that ended.

    If a job of an older session cannot be queued again now, as somebody holds a row or one is wrong, the sessions are
    opened without that. A sync of the new session queues it, once it can be, and charges it with a lost bot, even if
    the bot was only cut off.
    """
    answers: dict[str, Session | BadInput] = {}
    chosen: dict[str, tuple[str, SessionOpening]] = {}
    for request in requests:
        secret = request.secret or secrets.token_urlsafe(32)
        try:
            chosen[request.bot] = secret, _opening(request, secret)
        except BadInput as error:
            answers[request.bot] = error
    if chosen:

        def work(connection: Connection, *, tries: bool) -> dict[str, OpenedSession | BadInput]:
            named = {bot: opening.instance for bot, (_, opening) in chosen.items() if opening.instance is not None}
            unknown = refused_instances(connection, named.values())
            refused = {bot: refusal(name) for bot, name in named.items() if name in unknown}
            openings = [opening for bot, (_, opening) in chosen.items() if bot not in refused]
            opened = sessions.open_sessions(connection, openings, ttl=timing.ttl, tries=tries) if openings else []
            if tracer is not None:
                tracer.trace(connection, [attempt for each in opened for attempt in each.ended])
            return refused | {opening.name: each for opening, each in zip(openings, opened, strict=True)}

        try:
            found = database.waiting_once().run(partial(work, tries=False), urgent=True)
        except HINDRANCES:
            found = database.run(partial(work, tries=True), urgent=True)
        for bot, each in found.items():
            if isinstance(each, BadInput):
                answers[bot] = each
                continue
            secret, _ = chosen[bot]
            answers[bot] = Session(
                bot=bot,
                epoch=each.epoch,
                secret=secret,
                expires_in=timing.ttl,
                sync_in=timing.sync,
            )
    return [answers[request.bot] for request in requests]


def _opening(request: OpenSession, secret: str) -> SessionOpening:
    properties = normal_properties("properties", request.properties)
    for name in request.exclusive:
        if name not in properties:
            raise BadInput("exclusive", f"'{escaped(name, 60)}' is not one of the bot's properties")
    if FARM in properties and FARM not in request.exclusive:
        raise BadInput("exclusive", f"must name '{FARM}': bots that run actions run nothing else")
    if request.tasks is not None:
        # Hundreds of bots of one version tell the same: they are of one kind, which has the list once.
        properties[TASK] = sorted(set(request.tasks))
    return SessionOpening(
        request.bot,
        session=digest(secret),
        capacity=request.capacity,
        priority=request.priority,
        properties=properties,
        exclusive=sorted(set(request.exclusive)),
        instance=request.instance,
        pool=request.pool,
        labels=sorted(set(request.labels)),
        supply=request.resources,
        dead=None if request.dead_session is None else bytes.fromhex(request.dead_session),
        cut_off=request.cut_off,
        host=request.host,
        pid=request.pid,
        version=request.version,
        kill_grace=request.kill_grace,
    )
