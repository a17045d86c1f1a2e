"""Tokens: who may call the gateway, and what the holder of a token may do.

A token reads `lh_<kind>_<id>_<secret><checksum>`: 12 hex digits of id, 64 of secret (32 random bytes) and 8 of a
CRC-32 of everything before it. The checksum detects typing errors without a query. Only the SHA-256 of the text is
stored; it is compared in constant time.
"""

import binascii
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import assert_never

from leasehold import wire
from leasehold.errors import BadInput, Forbidden, NotFound, Unauthorised

from schema import audit, validation
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.validation import YEAR

#: An allowed value that stands for every value of its key, or for every label.
ANY_VALUE = "*"


class Kind(StrEnum):
    """The role of a token's holder."""

    SUBMITTER = "submitter"
    BOT = "bot"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Principal:
    """The holder of a verified token, and what it may do.

    instance: the only instance it may use, or that a bot may serve; None = every instance.
    bot: for a bot, the name that it may use: exact, or a prefix that ends in `*`.
    priority_ceiling: the most urgent (lowest) priority it may request; None = any.
    properties: the keys and values that a bot may declare (`*` = any value); None = any.
    labels: the labels that a bot may declare (`*` = any).
    pool: the only pool whose instances a bot may serve.

    A bot token without instance, properties, labels and pool allows all labels and pools. A bot token with any of them
    allows only the labels and the pool that it names.
    """

    kind: Kind
    id: str
    instance: str | None = None
    bot: str | None = None
    priority_ceiling: int | None = None
    properties: Mapping[str, Sequence[str]] | None = None
    labels: Sequence[str] | None = None
    pool: str | None = None

    @property
    def actor(self) -> str:
        """The name of this holder in events and in the audit."""
        return f"{self.kind}:{self.id}"

    @property
    def is_operator(self) -> bool:
        return self.kind is Kind.OPERATOR

    @property
    def instances(self) -> list[str] | None:
        """The instances whose jobs the holder may see; None = all."""
        return None if self.instance is None else [self.instance]

    def may_use_instance(self, name: str) -> bool:
        """True if the holder may submit to the instance `name` and see its jobs."""
        match self.kind:
            case Kind.OPERATOR:
                return True
            case Kind.SUBMITTER:
                return self.instance is None or self.instance == name
            case Kind.BOT:
                return False
            case _ as never:
                assert_never(never)

    def may_use_priority(self, priority: int) -> bool:
        """True if `priority` (lower = more urgent) is not more urgent than the ceiling."""
        return self.priority_ceiling is None or priority >= self.priority_ceiling

    def may_be_bot(self, name: str) -> bool:
        """True if the holder may act as the bot `name`."""
        if self.kind is not Kind.BOT or self.bot is None:
            return False
        if self.bot.endswith("*"):
            return name.startswith(self.bot[:-1])
        return name == self.bot

    def check_bot(self, name: str) -> None:
        """Raise Forbidden unless the holder may act as the bot `name`."""
        if not self.may_be_bot(name):
            raise Forbidden(f"bot: this token is not for a bot named '{wire.escaped(name, 80)}'")

    def check_session(
        self,
        name: str,
        *,
        instance: str | None,
        properties: Mapping[str, Sequence[str] | str],
        labels: Sequence[str] = (),
        pool: str | None = None,
    ) -> None:
        """Raise Forbidden unless the holder may open a session as bot `name` with these declarations."""
        self.check_bot(name)
        if self.instance is not None and instance != self.instance:
            raise Forbidden(f"instance: this token is for bots that serve only '{self.instance}'")
        if self.pool is not None and pool != self.pool:
            raise Forbidden(f"pool: this token is for bots that serve only the pool '{self.pool}'")
        limited = any(each is not None for each in (self.instance, self.properties, self.labels, self.pool))
        if not limited:
            return
        if pool != self.pool:
            raise Forbidden("pool: this token may not serve a pool")
        allowed = self.labels or ()
        for label in labels:
            if ANY_VALUE not in allowed and label not in allowed:
                raise Forbidden(f"labels: this token may not declare '{wire.escaped(label, 80)}'")
        self._check_properties(properties)

    def _check_properties(self, properties: Mapping[str, Sequence[str] | str]) -> None:
        if self.properties is None:
            # Results of actions are for everybody, so whoever runs them was named by an operator.
            if validation.FARM in properties:
                raise Forbidden(
                    f"properties.{validation.FARM}: this token does not name it, so its bots run no actions"
                )
            return
        for key, given in properties.items():
            allowed = self.properties.get(key, ())
            values = [given] if isinstance(given, str) else given
            if ANY_VALUE not in allowed and not set(values) <= set(allowed):
                raise Forbidden(f"properties.{wire.escaped(key, 60)}: this token may not declare that value")


#: Longest note of a token, bytes of UTF-8.
MAX_NOTE = 200

_FORM = re.compile(r"lh_(submitter|bot|operator)_([0-9a-f]{12})_([0-9a-f]{64})([0-9a-f]{8})")
_ID = re.compile(r"[0-9a-f]{12}")
#: Compared against when no token has the id, so that the answer takes as long as for a wrong secret.
_NOBODY = hashlib.sha256(b"nobody").digest()


@dataclass(frozen=True)
class StoredToken:
    """A stored token as an operator sees it: everything but the secret."""

    id: str
    kind: Kind
    instance: str | None
    bot: str | None
    priority_ceiling: int | None
    properties: Mapping[str, Sequence[str]] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    labels: Sequence[str] | None
    pool: str | None
    note: str | None


# One token by its id. The database decides whether it has expired, because `expires_at` is the database's time.
_FIND = Statement("""
SELECT *, revoked_at IS NOT NULL AS revoked, coalesce(expires_at <= now(), false) AS expired
FROM tokens WHERE id = :token_id
""")
_CREATE = Statement("""
INSERT INTO tokens (id, kind, digest, instance, bot, priority_ceiling, properties, labels, pool, note, expires_at)
VALUES (:id, :kind, :digest, :instance, :bot, :priority_ceiling, CAST(:properties AS jsonb), :labels, :pool, :note,
    now() + make_interval(secs => :expires_in))
""")

#: Who makes and revokes tokens: a command beside the database, and no caller of a gateway.
ACTOR = "local"

# A second revocation keeps the time of the first.
_REVOKE = Statement("""
UPDATE tokens SET revoked_at = coalesce(revoked_at, now()) WHERE id = :token_id RETURNING kind
""")

_LIST = Statement(f"SELECT {', '.join(StoredToken.__dataclass_fields__)} FROM tokens ORDER BY created_at DESC, id")


def create(
    connection: Connection,
    kind: Kind | str,
    *,
    instance: str | None = None,
    bot: str | None = None,
    priority_ceiling: int | None = None,
    properties: Mapping[str, str | Sequence[str]] | None = None,
    labels: Sequence[str] | None = None,
    pool: str | None = None,
    expires_in: float | None = None,
    note: str | None = None,
) -> str:
    """Store a new token and return its text. The text cannot be read again later.

    A submitter may have an instance and a priority ceiling (-1000…1000). A bot must have a name or prefix; it may have
    an instance or a pool, and lists of allowed properties and labels. An operator has none of these. `expires_in` is
    in seconds, at most a year. `note` tells operators who holds it or what it is for: one line of at most 200 bytes.
    Raises BadInput that names the argument.
    """
    chosen = _kind(kind)
    check_scope(
        chosen, instance=instance, bot=bot, ceiling=priority_ceiling, properties=properties, labels=labels, pool=pool
    )
    if expires_in is not None and not 0 < expires_in <= YEAR:
        raise BadInput("expires_in", f"must be more than 0 and at most {YEAR:.0f} seconds")
    _check_note(note)
    allowed = None if properties is None else validation.normal_properties("properties", properties)
    identity = secrets.token_hex(6)
    body = f"lh_{chosen}_{identity}_{secrets.token_hex(32)}"
    token = body + _checksum(body)
    row = {
        "id": identity,
        "kind": str(chosen),
        "digest": digest(token),
        "instance": instance,
        "bot": bot,
        "priority_ceiling": priority_ceiling,
        "properties": None if allowed is None else json.dumps(allowed),
        "labels": None if labels is None else sorted(set(labels)),
        "pool": pool,
        "note": note,
        "expires_in": expires_in,
    }
    connection.execute(_CREATE, row)
    scope = {
        "kind": str(chosen),
        "instance": instance,
        "bot": bot,
        "pool": pool,
        "labels": row["labels"],
        "expires_in": expires_in,
        "note": note,
    }
    audit.write(connection, "token.create", actor=ACTOR, subject=identity, details=scope)
    return token


def verify(connection: Connection, token: str) -> Principal:
    """Return the holder of this token.

    Raises Unauthorised. The message does not reveal whether the id is unknown or the secret wrong.
    """
    identity = parse(token)
    row = connection.execute(_FIND, {"token_id": identity}).mappings().one_or_none()
    stored = _NOBODY if row is None else bytes(row["digest"])
    same = hmac.compare_digest(stored, digest(token))
    if row is None or not same:
        raise Unauthorised("the token is not known")
    if row["revoked"]:
        raise Unauthorised("the token was revoked")
    if row["expired"]:
        raise Unauthorised("the token has expired")
    return Principal(
        kind=Kind(row["kind"]),
        id=identity,
        instance=row["instance"],
        bot=row["bot"],
        priority_ceiling=row["priority_ceiling"],
        properties=row["properties"],
        labels=row["labels"],
        pool=row["pool"],
    )


def parse(token: str) -> str:
    """Return the id in a token's text. Raises Unauthorised if the form or the checksum is wrong."""
    found = _FORM.fullmatch(token)
    if found is None:
        raise Unauthorised("this is not a token: it should read lh_<kind>_<id>_<secret>")
    if not hmac.compare_digest(_checksum(token[:-8]), found[4]):
        raise Unauthorised("the token has a typing error: its checksum does not fit")
    return found[2]


def revoke(connection: Connection, token_id: str) -> None:
    """Revoke a token for good. Gateways notice within their `token_cache_seconds`. Raises NotFound."""
    row = connection.execute(_REVOKE, {"token_id": token_id}).one_or_none() if _ID.fullmatch(token_id) else None
    if row is None:
        raise NotFound(f"there is no token '{wire.escaped(token_id, 40)}'")
    audit.write(connection, "token.revoke", actor=ACTOR, subject=token_id, details={"kind": row.kind})


def list_tokens(connection: Connection) -> list[StoredToken]:
    """Every token, newest first, including revoked and expired ones."""
    return [StoredToken(**row | {"kind": Kind(row["kind"])}) for row in connection.execute(_LIST).mappings()]


def digest(token: str) -> bytes:
    """The SHA-256 of a token's text, used in the database and as a key of caches."""
    return hashlib.sha256(token.encode()).digest()


def _checksum(body: str) -> str:
    return f"{binascii.crc32(body.encode()):08x}"


def _kind(kind: Kind | str) -> Kind:
    try:
        return Kind(kind)
    except ValueError:
        raise BadInput("kind", f"'{wire.escaped(kind, 40)}' is not one of submitter, bot, operator") from None


def _check_note(note: str | None) -> None:
    if note is None:
        return
    validation.check_text("note", note, MAX_NOTE)
    if not (note.strip() and note.isprintable()):
        raise BadInput("note", "must be one line of printable text")


def check_scope(
    kind: Kind,
    *,
    instance: str | None,
    bot: str | None,
    ceiling: int | None,
    properties: Mapping[str, str | Sequence[str]] | None,
    labels: Sequence[str] | None,
    pool: str | None,
) -> None:
    """Raise BadInput unless a token of this kind may have these limits."""
    _check_names(kind, instance=instance, bot=bot, ceiling=ceiling)
    _check_declared(kind, properties=properties, labels=labels, pool=pool, instance=instance)


def _check_names(kind: Kind, *, instance: str | None, bot: str | None, ceiling: int | None) -> None:
    if instance is not None:
        validation.check_name("instance", instance)
    match kind:
        case Kind.SUBMITTER:
            foreign = {"bot": bot is not None}
        case Kind.BOT:
            foreign = {"priority_ceiling": ceiling is not None}
            if bot is None:
                raise BadInput("bot", "a bot token needs a bot name, or a prefix that ends in '*'")
            if bot != ANY_VALUE:
                validation.check_name("bot", bot.removesuffix("*"))
        case Kind.OPERATOR:
            names = {"instance": instance, "bot": bot, "priority_ceiling": ceiling}
            foreign = {name: value is not None for name, value in names.items()}
        case _ as never:
            assert_never(never)
    for name, given in foreign.items():
        if given:
            raise _meaningless(name, kind)
    if ceiling is not None and not validation.PRIORITY_MIN <= ceiling <= validation.PRIORITY_MAX:
        raise BadInput("priority_ceiling", f"must be between {validation.PRIORITY_MIN} and {validation.PRIORITY_MAX}")


def _check_declared(
    kind: Kind,
    *,
    properties: Mapping[str, str | Sequence[str]] | None,
    labels: Sequence[str] | None,
    pool: str | None,
    instance: str | None,
) -> None:
    """Raise BadInput unless a token of this kind may have these properties, labels and pool."""
    if kind is not Kind.BOT:
        for name, value in {"properties": properties, "labels": labels, "pool": pool}.items():
            if value is not None:
                raise _meaningless(name, kind)
    for label in labels or ():
        if not validation.check_text("labels", label, validation.MAX_LABEL):
            raise BadInput("labels", "a label must not be empty")
    if pool is not None:
        validation.check_name("pool", pool)
        if instance is not None:
            raise BadInput("pool", "means nothing together with instance: a bot serves one of them")


def _meaningless(field: str, kind: Kind) -> BadInput:
    return BadInput(field, f"means nothing for a token of kind {kind}")
