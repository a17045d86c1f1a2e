"""Names that configuration files declare. Operators cannot change them by command, because a reload would undo it.

Every assigner process writes them when it starts or reloads its configuration. The process that wrote last wins, as it
does with the declared objects themselves.
"""

from collections.abc import Iterable, Sequence

from leasehold.errors import Conflict
from leasehold.wire import escaped

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement

#: Stable word for programs in a refusal.
CODE = "declared"

_KNOWN = Statement("SELECT name FROM declarations WHERE kind = :kind")
_FORGET = Statement("DELETE FROM declarations WHERE kind = :kind AND name = ANY (CAST(:names AS text[]))")
_NOTE = Statement("""
INSERT INTO declarations (kind, name) SELECT :kind, unnest(CAST(:names AS text[])) ON CONFLICT DO NOTHING
""")
_FIND = Statement("SELECT name FROM declarations WHERE kind = :kind AND name = ANY (CAST(:names AS text[])) LIMIT 1")


def replace(connection: Connection, kind: str, names: Iterable[str]) -> set[str]:
    """Store `names` as all declared names of a kind, and return those that were stored before.

    Writes nothing if they are stored already.
    """
    wanted = set(names)
    known = set(connection.execute(_KNOWN, {"kind": kind}).scalars())
    if known - wanted:
        connection.execute(_FORGET, {"kind": kind, "names": sorted(known - wanted)})
    if wanted - known:
        connection.execute(_NOTE, {"kind": kind, "names": sorted(wanted - known)})
    return known


def refuse(connection: Connection, kind: str, names: Sequence[str], *, section: str) -> None:
    """Raise Conflict `declared` if the configuration declares one of `names`; `section` is its section in the file."""
    found = connection.execute(_FIND, {"kind": kind, "names": list(names)}).scalar_one_or_none()
    if found is not None:
        raise Conflict(CODE, f"{kind} '{escaped(found, 127)}' is declared in the configuration: change {section} there")
