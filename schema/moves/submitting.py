"""nothing -> queued: submit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from schema.errors import Conflict
from schema.limits import escaped

# The function is the one implementation, for callers in SQL as well as for this one.
SUBMIT = text("SELECT n, job_id, public_id, created, same FROM submit(CAST(:requests AS jsonb), :actor) ORDER BY n")


@dataclass(frozen=True)
class Submitted:
    """One accepted job; `created` is false when its key had been used before by an equal request."""

    job_id: int
    public_id: str
    created: bool


def submit(connection: Connection, requests: Sequence[Mapping[str, Any]], *, actor: str) -> list[Submitted]:
    """Queue all `requests`, or none. Answers are in the order of the requests.

    A request holds instance, properties (in normal form), payload, and optionally key, priority, units, label,
    locality_hint, timeout_seconds, max_attempts and retry_failed. A request whose key was used before in its
    instance gets the earlier job; raises Conflict `key_reused` when that one was submitted with another content.
    """
    rows = connection.execute(SUBMIT, {"requests": json.dumps(list(requests)), "actor": actor}).all()
    for row in rows:
        if not row.same:
            key = escaped(str(requests[row.n].get("key")), 80)
            raise Conflict("key_reused", f"jobs[{row.n}].key: '{key}' was used before for a different request")
    return [Submitted(row.job_id, str(row.public_id), row.created) for row in rows]
