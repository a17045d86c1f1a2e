"""Opening the session of a bot."""

import hashlib
import secrets

from sqlalchemy import Connection, text

from bots.protocol import OpenSession, Session
from schema.errors import BadInput
from schema.moves import sessions
from schema.moves.sessions import OpenedSession
from schema.postgres import advisory
from schema.postgres.engine import Database
from schema.timing import Timing
from schema.validation import escaped, normal_properties

INTERN_INSTANCE = text("SELECT intern_instance(:name)")


def digest(secret: str) -> bytes:
    """What is stored of a session's secret."""
    return hashlib.sha256(secret.encode()).digest()


def open_session(database: Database, request: OpenSession, *, timing: Timing) -> Session:
    """Open a session. Raises BadInput for properties that break the limits, and for exclusive ones that are not there.

    An older session of the same name ends, and its jobs are queued again. They are not granted before that session
    would have expired, unless the request says that it is dead. A lost bot does not count against them if it says that
    it was only cut off. A repeated request with the bot's own secret finds the
    session that it opened.
    """
    properties = normal_properties("properties", request.properties)
    for name in request.exclusive:
        if name not in properties:
            raise BadInput("exclusive", f"'{escaped(name, 60)}' is not one of the bot's properties")
    secret = request.secret or secrets.token_urlsafe(32)

    def work(connection: Connection) -> OpenedSession:
        instance = None
        if request.instance is not None:
            # Before any row lock.
            advisory.freeze_requirement_sets(connection)
            instance = connection.execute(INTERN_INSTANCE, {"name": request.instance}).scalar_one()
        return sessions.open_session(
            connection,
            request.bot,
            session=digest(secret),
            capacity=request.capacity,
            priority=request.priority,
            properties=properties,
            exclusive=sorted(set(request.exclusive)),
            instance=instance,
            pool=request.pool,
            labels=sorted(set(request.labels)),
            ttl=timing.ttl,
            supply=request.resources,
            dead=None if request.dead_session is None else bytes.fromhex(request.dead_session),
            cut_off=request.cut_off,
        )

    opened = database.run(work, urgent=True)
    return Session(bot=request.bot, epoch=opened.epoch, secret=secret, expires_in=timing.ttl, sync_in=timing.sync)
