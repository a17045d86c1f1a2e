"""Cursors of lists of jobs: the sort key of the last job of a page, in a form that does not tell its row id.

Row ids count the jobs of all tenants. The id is hidden by a secret of the pool and a random number.
"""

import base64
import hmac
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from secrets import token_hex
from typing import Any

from leasehold.errors import BadInput

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

SECRET = Statement("SELECT value FROM secrets WHERE name = 'cursor'")


#: Types of keys, and what reads their values.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "bigint": int,
    "float8": float,
    "timestamptz": datetime.fromisoformat,
}


def encode(connection: Connection, key: Sequence[Any], *, of: str) -> str:
    """Return the cursor behind this sort key, whose last value is a row id. of: what the pages of the list have in
    common."""
    secret, nonce = _secret(connection), token_hex(8)
    *first, row_id = key
    given = [value.isoformat() if isinstance(value, datetime) else value for value in first]
    whole = [nonce, *given, row_id ^ _mask(secret, nonce)]
    return base64.urlsafe_b64encode(json.dumps([_digest(secret, of, whole), *whole]).encode()).decode().rstrip("=")


def decode(connection: Connection, cursor: str, *, kinds: Sequence[str], of: str) -> list[Any]:
    """Return the sort key in the cursor. kinds: the types of its values. Raises BadInput for anything that no page of
    this list gave: by changed cursors the id could be found out."""
    secret = _secret(connection)
    try:
        digest, *whole = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), "-_", True))
        is_ours = hmac.compare_digest(digest, _digest(secret, of, whole))
    except (ValueError, TypeError):
        raise BadInput("cursor", "is not the `next` of a page") from None
    if not is_ours:
        raise BadInput("cursor", "belongs to a list with other filters or in another order")
    nonce, *given = whole
    *first, row_id = [_READERS[kind](value) for kind, value in zip(kinds, given, strict=True)]
    return [*first, row_id ^ _mask(secret, nonce)]


def _secret(connection: Connection) -> bytes:
    return uuid.UUID(connection.execute(SECRET).scalar_one()).bytes


def _digest(secret: bytes, of: str, whole: Sequence[Any]) -> str:
    return hmac.digest(secret, json.dumps([of, *whole]).encode(), "sha256").hex()[:32]


def _mask(secret: bytes, nonce: str) -> int:
    """Return the 63 bits that hide the row id of one cursor. Each cursor has other bits."""
    return int.from_bytes(hmac.digest(secret, nonce.encode(), "sha256")[:8]) >> 1
