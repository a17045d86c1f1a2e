"""Versions of the policy: what decides who starts when, as it was after each change, and which one is in force.

A version is a row that never changes. Its content has three parts. `settings` is what the configuration tells assigners
and gateways, by section. `limits` is what operators set, by resource and name, without what is in use of it. `declared`
is which of that the configuration names. Each change of the policy locks the row of the version in force first, and
makes a version in its own transaction.

One module because what a version holds is what is compared, and a version stores how it differs from the one before.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

from leasehold.errors import Conflict, NotFound
from pydantic_core import to_json

from schema import audit
from schema.policy import trials
from schema.postgres.connection import Connection
from schema.postgres.notify import wake
from schema.postgres.statements import Statement

#: Versions that are kept, the newest; the one in force is kept too.
KEPT = 1000
#: The first changes of a version that are stored with it. All others follow from its content and its parent's.
STORED_CHANGES = 100
#: Sections of the configuration that decide.
SECTIONS = frozenset({"assigners", "quotas", "fair_share", "ordering", "checkers", "success", "fetch"})
#: Seconds for which a change waits for another one; less than a statement may take.
HELD_WITHIN = 8.0
NONE_YET = "policy: there is no version yet"
#: The error code of a change while the content of the version in force cannot be read.
UNREADABLE = "policy_unreadable"

Content = trials.Content

# For each resource the name of every item, and its terms as an operator would set them.
_LIMITS = {
    "instance": "SELECT name, jsonb_build_object('pool', pool) FROM instances WHERE pool IS NOT NULL",
    "account": """
        SELECT i.name, jsonb_build_object('weight', a.credit_weight, 'unit', a.unit, 'budget', c.most::float8,
            'max_concurrent', j.most::float8, 'slots', j.slots::float8)
        FROM accounts a JOIN instances i ON i.id = a.instance
        LEFT JOIN counters c ON c.name = 'instance:' || i.name || '\\:cost'
        LEFT JOIN counters j ON j.name = 'instance:' || i.name || '\\:jobs'""",
    "pool-limit": """
        SELECT '', jsonb_build_object(
            'max_concurrent', (SELECT most::float8 FROM counters WHERE name = 'pool\\:jobs'),
            'budget', (SELECT most::float8 FROM counters WHERE name = 'pool\\:cost'))""",
    "lock": """
        SELECT replace(substr(name, 6), '\\:', '/'), jsonb_build_object('slots', most::float8)
        FROM counters WHERE name LIKE 'lock\\:%' AND limited_by = '' AND most IS NOT NULL
        UNION ALL
        SELECT replace(substr(prefix, 6), '\\:', '/') || '*', jsonb_build_object('slots', most::float8)
        FROM limit_patterns WHERE prefix LIKE 'lock\\:%'""",
    "rate": """
        SELECT substr(name, 6), jsonb_build_object('per_second', rate, 'burst', burst)
        FROM rate_buckets WHERE limited_by IS NULL
        UNION ALL
        SELECT substr(prefix, 6) || '*', jsonb_build_object('per_second', rate, 'burst', burst)
        FROM limit_patterns WHERE prefix LIKE 'rate\\:%'""",
    "cohort": """
        SELECT name, jsonb_build_object('reclaim_min', reclaim_min) || CASE WHEN id = 0 THEN '{}'
            ELSE jsonb_build_object('labels', labels, 'position', position) END FROM cohorts""",
    "quota": """
        SELECT c.name || '/' || i.name, jsonb_build_object('min', q.min_quota, 'max', q.max_quota)
        FROM quotas q JOIN cohorts c ON c.id = q.cohort JOIN instances i ON i.id = q.instance""",
    "owner-quota": """
        SELECT split_part(name, '\\:', 2) || '/' || split_part(name, '\\:', 3), jsonb_build_object('cost', most::float8)
        FROM counters WHERE name LIKE 'owner\\:%\\:cost' AND most IS NOT NULL""",
    "project-quota": """
        SELECT split_part(name, '\\:', 2) || '/' || split_part(name, '\\:', 3), jsonb_build_object('cost', most::float8)
        FROM counters WHERE name LIKE 'project\\:%\\:cost' AND most IS NOT NULL""",
    "queue-limit": """
        SELECT label, jsonb_build_object('max_queued', max_queued) FROM queue_limits WHERE label IS NOT NULL""",
    "instance-queue-limit": """
        SELECT coalesce(i.name, '*'), jsonb_build_object('max_queued', q.max_queued)
        FROM queue_limits q LEFT JOIN instances i ON i.id = q.instance WHERE q.label IS NULL""",
    "ceiling": """
        SELECT coalesce(i.name, '*') || '/' || coalesce(c.label, '*'), jsonb_build_object(
            'default_timeout', c.default_timeout, 'max_timeout', c.max_timeout, 'max_queue_age', c.max_queue_age)
        FROM ceilings c LEFT JOIN instances i ON i.id = c.instance""",
    "submit-rule": """
        SELECT coalesce(i.name, '*'), jsonb_build_object('property_keys', r.property_keys, 'commands', r.commands,
            'owner_cost', r.owner_cost::float8, 'owner_penalty', r.owner_penalty)
        FROM submit_rules r LEFT JOIN instances i ON i.id = r.instance""",
    "report-ceiling": """
        SELECT i.name || '/' || c.key, jsonb_build_object('amount', c.value)
        FROM instances i CROSS JOIN LATERAL jsonb_each(
            CASE jsonb_typeof(i.report_ceilings) WHEN 'object' THEN i.report_ceilings ELSE '{}' END) c""",
    "window": """
        SELECT name, jsonb_build_object('start', starts, 'end', ends, 'zone', zone, 'types', types, 'exempt_types',
            exempt_types, 'match', match, 'meter', meter, 'usage_threshold', usage_threshold, 'meter_max_age',
            meter_max_age) FROM windows""",
    "class": "SELECT name, jsonb_build_object('points', points) FROM job_classes",
    "class-limit": """
        SELECT split_part(name, '\\:', 2), jsonb_build_object('jobs', most::float8)
        FROM counters WHERE name LIKE 'class\\:%\\:jobs' AND most IS NOT NULL""",
    "class-reserve": "SELECT name, jsonb_build_object('jobs', jobs) FROM class_reserves",
    "service-level": """
        SELECT name, jsonb_build_object('points', points, 'timeout_seconds', timeout_seconds) FROM service_levels""",
    "scheduling": "SELECT '', to_jsonb(s) - 'one' FROM scheduling s",
}
#: The resources that decide; a version has what operators set of them.
DECIDING = frozenset(_LIMITS)
_READ = Statement(f"""
SELECT jsonb_build_object({", ".join(
    f"'{name}', (SELECT coalesce(jsonb_object_agg(name, terms), '{{}}') FROM ({items}) AS t (name, terms))"
    for name, items in _LIMITS.items()
)}) AS limits,
    (SELECT coalesce(jsonb_object_agg(kind, names), '{{}}') FROM (
        SELECT kind, jsonb_object_agg(name, true) AS names FROM declarations GROUP BY kind) d) AS declared
""")  # fmt: skip
# Two statements: one that has waited for the lock would not see the version that was made meanwhile.
_HOLD = Statement("SELECT id FROM policy_in_force FOR NO KEY UPDATE")
_CONTENT = Statement("SELECT content FROM policies WHERE id = :id")
_MAKE = Statement("""
WITH made AS (
    INSERT INTO policies (digest, author, reason, parent, changed, changes, content, drafted)
    VALUES (:digest, :author, :reason, :parent, :changed, CAST(:changes AS jsonb), CAST(:content AS jsonb), :drafted)
    RETURNING id
), forgotten AS (
    DELETE FROM policies p USING made, policy_in_force f WHERE p.id <= made.id - :kept
        AND p.id IS DISTINCT FROM :parent AND p.id IS DISTINCT FROM CAST(f.origin ->> 'before' AS integer)
        AND NOT EXISTS (SELECT FROM policy_canaries c WHERE c.ended_at IS NULL AND p.id IN (c.policy, c.base))
)
SELECT id FROM made
""")
_TRY = Statement("""
INSERT INTO policies (id, digest, author, reason, changed, changes, content, drafted) OVERRIDING SYSTEM VALUE
VALUES (0, '', '', '', 0, '{}', '{}', true)
""")
# A version that was the shadow has shown what there was to see.
_PUT_IN_FORCE = Statement("""
WITH ended AS (
    UPDATE policy_shadows SET ended_at = clock_timestamp(), ended = 'its version came into force'
    WHERE policy = :id AND ended_at IS NULL AND ends_at > clock_timestamp()
)
UPDATE policy_in_force SET id = :id, since = clock_timestamp(), origin = CAST(:origin AS jsonb)
    || CASE WHEN origin ? 'repricing' THEN jsonb_build_object('repricing', origin -> 'repricing') ELSE '{}' END
""")
_ORIGIN = Statement("""
SELECT f.origin ->> 'of' IS NOT DISTINCT FROM CAST(f.id AS text) AS is_told, f.origin, p.parent
FROM policy_in_force f JOIN policies p ON p.id = f.id
""")
_COLUMNS = """
p.id, encode(p.digest, 'hex') AS digest, p.made_at, p.author, p.reason, p.parent, p.changed, p.changes, p.drafted"""
_LIST = Statement(f"""
SELECT {_COLUMNS}, NULL AS content, p.id = f.id AS in_force FROM policies p CROSS JOIN policy_in_force f
WHERE CAST(:before AS integer) IS NULL OR p.id < :before ORDER BY p.id DESC LIMIT :limit
""")
_ONE = Statement(f"""
SELECT {_COLUMNS}, p.content, p.id IS NOT DISTINCT FROM f.id AS in_force
FROM policies p CROSS JOIN policy_in_force f WHERE p.id = coalesce(CAST(:id AS integer), f.id)
""")
# What a process asks each second: a content comes only if the number is another one than it knows.
LOOK = Statement("""
SELECT f.id, CASE WHEN f.id IS DISTINCT FROM CAST(:known AS integer)
    THEN (SELECT content -> 'settings' FROM policies p WHERE p.id = f.id) END AS settings,
    s.id AS shadow, s.policy AS candidate, s.share, CASE WHEN s.id IS DISTINCT FROM CAST(:shadow AS integer)
    THEN (SELECT content -> 'settings' FROM policies p WHERE p.id = s.policy) END AS candidate_settings
FROM policy_in_force f LEFT JOIN LATERAL (
    SELECT s.id, s.policy, s.share FROM policy_shadows s
    WHERE s.ended_at IS NULL AND s.ends_at > clock_timestamp() AND s.policy IS DISTINCT FROM f.id
        AND EXISTS (SELECT FROM policies p WHERE p.id = s.policy)
    ORDER BY s.id DESC LIMIT 1) s ON true
""")
#: The settings of the version that a trial tries, and the ids of its cohorts and of all others.
TRIED = Statement("""
SELECT (SELECT content -> 'settings' FROM policies WHERE id = :policy) AS settings,
    (SELECT array_agg(id ORDER BY id) FILTER (WHERE name = ANY (CAST(:names AS text[]))) FROM cohorts) AS tried,
    (SELECT array_agg(id ORDER BY id) FILTER (WHERE name <> ALL (CAST(:names AS text[]))) FROM cohorts) AS others
""")
# What a process may work by that cannot use the version in force: the one before it first, then the newest.
OTHERS = Statement("""
SELECT id, settings FROM (
    SELECT 0 AS nth, p.id, p.content -> 'settings' AS settings
    FROM policy_in_force f JOIN policies p ON p.id = CAST(f.origin ->> 'before' AS integer)
    UNION ALL
    SELECT 1, n.* FROM (
        SELECT id, content -> 'settings' FROM policies WHERE id <> :refused AND NOT drafted ORDER BY id DESC LIMIT 10) n
) o ORDER BY nth, id DESC
""")
_RAN_BY = Statement("""
SELECT kind, name, policy FROM (
    SELECT 'assigner' AS kind, name, policy, seen_at, stopped_at FROM assigners
    UNION ALL SELECT 'gateway', name, policy, seen_at, stopped_at FROM gateways) p
WHERE stopped_at IS NULL AND seen_at >= clock_timestamp() - make_interval(secs => :dead_after) ORDER BY kind, name
""")


@dataclass(frozen=True)
class Change:
    """A value that differs. what: a resource and the item's name, or a section. before, after: None = there is none."""

    what: str
    field: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Version:
    """One version. parent: the one that was in force before; None = there was none. changed: how many values differ
    from it, and `changes` the first of them. drafted: it was made without being put into force. content: None in
    lists, and of the version in force if it cannot be read."""

    id: int
    digest: str
    made_at: datetime
    author: str
    reason: str
    parent: int | None
    changed: int
    changes: Sequence[Change]
    drafted: bool
    content: Content | None
    in_force: bool


@dataclass(frozen=True)
class Origin:
    """How the version in force came to be so.

    before: the version that a rollback puts into force; None = there is none. undid: the version that a rollback took
    back; None = it was no rollback. kept: what could not be as in the version that was wanted.
    """

    before: int | None
    undid: int | None = None
    kept: Sequence[str] = ()


@dataclass(frozen=True)
class Runner:
    """A live process and the version by which it works; None = it has told none yet."""

    kind: str
    name: str
    policy: int | None


def read(connection: Connection, settings: Mapping[str, Any]) -> Content:
    """Return what decides now: these settings, what operators have set, and what is declared."""
    row = connection.execute(_READ).one()
    return {"settings": settings, "limits": row.limits, "declared": row.declared}


def hold(connection: Connection) -> int | None:
    """Lock the policy against other changes until this transaction ends; return the version in force, if there is one.

    Come here before any other lock. It is waited for up to HELD_WITHIN seconds.
    """
    # Who activates a version of a pool with many instances holds it for longer than others wait for rows.
    with connection.waiting_for_locks(HELD_WITHIN):
        held: int | None = connection.execute(_HOLD).scalar_one()
    return held


def hold_content(connection: Connection) -> tuple[int | None, Content]:
    """Lock the policy as `hold` does; return the version in force and its content, which is empty without a version.

    Raises Conflict if the content cannot be read.
    """
    held, content = _hold_readable(connection)
    if content is None:
        said = f"policy: the content of version {held}, which is in force, cannot be read: wrong JSON is stored"
        way = "`leasehold policy activate N`, or make one first: `leasehold policy draft FILE`, and give --stale"
        raise Conflict(UNREADABLE, f"{said}; put another one into force: {way}")
    return held, content


def _hold_readable(connection: Connection) -> tuple[int | None, Content | None]:
    """As `hold_content`, but without a content if it cannot be read."""
    held = hold(connection)
    if held is None:
        return None, {}
    content = connection.execute(_CONTENT, {"id": held}).scalar_one()
    return held, content if _is_readable(content) else None


def note_change(
    connection: Connection,
    *,
    actor: str,
    reason: str,
    settings: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
) -> int | None:
    """Make a version of what decides now and put it into force, if it differs from the one in force; return its number.

    The caller has called `hold` in this transaction, and has made the changes. settings: None = as in force. origin:
    None = a rollback goes to the version in force. Raises Conflict if the content of that one cannot be read.
    """
    parent, before = hold_content(connection)
    content = read(connection, before.get("settings", {}) if settings is None else settings)
    if content == before:
        return None
    made = make(content, parent=parent, before=before, actor=actor, reason=reason)
    id: int = connection.execute(_MAKE, made.row).scalar_one()
    _put_in_force(connection, id, origin or Origin(parent))
    return id


@dataclass(frozen=True)
class Made:
    """A version that is made and not stored yet. row: its columns. To make one of a large policy takes seconds, so that
    a draft is made between transactions: the policy would be locked, and the connection idle for longer than it may."""

    parent: int | None
    reason: str
    row: Mapping[str, Any]


def present(connection: Connection) -> tuple[int, Content]:
    """Return the version in force, and its content with nothing of a trial that is running. Raises NotFound.

    If that cannot be read, the content is what decides now but for settings, so that a draft can be made of it.
    """
    if (found := in_force(connection)) is None:
        raise NotFound(NONE_YET)
    return found.id, trials.settled(connection, found.content or read(connection, {}))


def draft(connection: Connection, made: Made, *, actor: str) -> int | None:
    """Store a version that is not in force, audit it, and return its number. Who activates it puts it into force.

    None = another version is in force than the one that it was made of: it has to be made again.
    """
    if hold(connection) != made.parent:
        return None
    id: int = connection.execute(_MAKE, made.row).scalar_one()
    audit.write(connection, "policy.draft", actor=actor, subject=f"policy:{id}", details={"reason": made.reason})
    return id


def try_to_draft(connection: Connection, *, actor: str) -> None:
    """Write what `draft` writes, for a caller who undoes it, to see whether a draft could be stored."""
    connection.execute(_TRY)
    audit.write(connection, "policy.draft", actor=actor, subject="policy:0", details={})


def is_stale(connection: Connection, wanted: Version) -> bool:
    """Return whether this is a draft, and something was changed since it was made; what trials change does not count.

    So it is if what decides now cannot be read. The caller holds the policy.
    """
    if not wanted.drafted:
        return False
    then = connection.execute(_CONTENT, {"id": wanted.parent}).scalar_one_or_none()
    _, now = _hold_readable(connection)
    if then is None or now is None or not _is_readable(then):
        return True
    return trials.settled(connection, then) != trials.settled(connection, now)


def make(
    content: Content, *, parent: int | None, before: Content, actor: str, reason: str, drafted: bool = False
) -> Made:
    """Make a version with this content. before: that of its parent."""
    changes = [] if parent is None else differences(before, content)
    row = {
        "digest": sha256(canonical(content)).digest(),
        "author": actor,
        "reason": reason,
        "parent": parent,
        "changed": len(changes),
        "changes": json.dumps([vars(each) for each in changes[:STORED_CHANGES]]),
        "content": to_json(content).decode(),
        "kept": KEPT,
        "drafted": drafted,
    }
    return Made(parent, reason, row)


def put_in_force(connection: Connection, wanted: Version, origin: Origin, *, actor: str, reason: str) -> int:
    """Let this version be in force, and audit it; return the number of the version that is in force.

    The caller holds the policy, and has brought everything into the state of the version as far as it could. If
    something is otherwise, a version of what really decides is put into force, so that nobody else is blamed for it.
    """
    parent, before = _hold_readable(connection)
    assert wanted.content is not None
    content, put = read(connection, wanted.content["settings"]), wanted.id
    if content != wanted.content:
        if content == before and parent is not None:
            return parent
        why = f"as version {wanted.id}, except {'; '.join(origin.kept) or 'what it does not know'}"
        made = make(content, parent=parent, before=before or {}, actor=actor, reason=why[:500])
        put = connection.execute(_MAKE, made.row).scalar_one()
    _put_in_force(connection, put, origin)
    details = {"reason": reason, "kept": list(origin.kept), "wanted": wanted.id}
    audit.write(connection, "policy.activate", actor=actor, subject=f"policy:{put}", details=details)
    wake(connection, "jobs")
    return put


def _put_in_force(connection: Connection, id: int, origin: Origin) -> None:
    connection.execute(_PUT_IN_FORCE, {"id": id, "origin": json.dumps({"of": id, **vars(origin)})})


def origin(connection: Connection) -> Origin:
    """Return how the version in force came to be so. The caller holds the policy."""
    row = connection.execute(_ORIGIN).one_or_none()
    if row is None or not row.is_told:
        return Origin(None if row is None else row.parent)
    return Origin(row.origin["before"], row.origin["undid"], row.origin["kept"])


def versions(connection: Connection, *, before: int | None = None, limit: int) -> list[Version]:
    """Return up to `limit` versions, newest first; `before`: only those with a lower number."""
    return [_version(row._asdict()) for row in connection.execute(_LIST, {"before": before, "limit": limit})]


def version(connection: Connection, id: int | None) -> Version:
    """Return the version with this number, or the one in force for None. Raises NotFound."""
    row = connection.execute(_ONE, {"id": id}).one_or_none()
    if row is None:
        raise NotFound(NONE_YET if id is None else f"policy: version {id} is not kept")
    if not _is_readable(row.content):
        raise NotFound(f"policy: the content of version {row.id} cannot be read: wrong JSON is stored")
    return _version(row._asdict())


def in_force(connection: Connection) -> Version | None:
    """Return the version in force, without a content that cannot be read; None if there is none yet."""
    row = connection.execute(_ONE, {"id": None}).one_or_none()
    if row is None:
        return None
    return _version(row._asdict() | {"content": row.content if _is_readable(row.content) else None})


def runners(connection: Connection, *, dead_after: float) -> list[Runner]:
    """Return the live assigner and gateway processes, each with the version by which it works."""
    return [Runner(**row._asdict()) for row in connection.execute(_RAN_BY, {"dead_after": dead_after})]


def _version(row: dict[str, Any]) -> Version:
    """Return a version. Stored changes that cannot be read are told as one that says so."""
    try:
        row["changes"] = [Change(f"{each['what']}", f"{each['field']}", each["before"], each["after"])
                          for each in row["changes"]]  # fmt: skip
    except (LookupError, TypeError):
        row["changes"] = [Change("this version", "changes", None, "cannot be read: wrong JSON is stored")]
    return Version(**row)


def canonical(content: object) -> bytes:
    """Return JSON that is equal for equal contents."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def differences(before: Content, after: Content) -> list[Change]:
    """Return what differs between two contents, in the order of names."""
    one, other = dict(_leaves(_without(before, after))), dict(_leaves(_without(after, before)))
    return [
        Change(*key, one.get(key), other.get(key)) for key in sorted({*one, *other}) if one.get(key) != other.get(key)
    ]


def _without(content: Content, other: Content) -> Content:
    """Return a content without what the other has in the same way: a pool may have many thousands of items."""
    return {
        part: {
            section: {name: terms for name, terms in items.items() if terms != (found.get(section) or {}).get(name)}
            for section, items in sections.items()
            if items != found.get(section)
        }
        for part, sections in content.items()
        for found in [other.get(part, {})]
    }


def _is_readable(content: Content) -> bool:
    try:
        dict(_leaves(content))
        return {"settings", "limits"} <= set(content)
    except (AttributeError, TypeError):
        return False


def _leaves(content: Content) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield every value, by what it belongs to and its name there. No value and none at all are the same."""
    for section, found in content.get("settings", {}).items():
        if section == "assigners":
            for entry, terms in found.items():
                yield from ((("assigner " + entry, path), value) for path, value in _flat(terms))
        else:
            yield from ((("[" + section + "]", path), value) for path, value in _flat(found))
    for resource, items in content.get("limits", {}).items():
        for name, terms in items.items():
            what = f"{resource} {name}".rstrip()
            yield from (((what, path), value) for path, value in _flat(terms))
    for kind, names in content.get("declared", {}).items():
        yield from ((("in the file", f"{kind} {name}"), True) for name in names)


def _flat(terms: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in terms.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value


# Configuration files


_FILE = Statement("""
SELECT EXISTS (SELECT FROM policy_files WHERE digest = :digest) AS known,
    (SELECT digest FROM policy_files ORDER BY at DESC LIMIT 1) = :digest AS newest,
    (SELECT policy_file FROM assigners WHERE name = :process) AS before
""")
_NOTE_FILE = Statement("""
INSERT INTO policy_files (digest) VALUES (:digest) ON CONFLICT (digest) DO UPDATE SET at = clock_timestamp()
""")


def is_file_done(connection: Connection, digest: bytes, *, process: str, before: bytes | None) -> bool:
    """Return whether a process leaves its file aside, because it has been put into force since it was changed.

    before: the digest of the file that the process had before; None = the process has just started, and its row tells.
    A file that the process did not have before is a change, even if it was in force earlier, unless it is the file that
    was put into force last: by another process that has the same one.
    """
    row = connection.execute(_FILE, {"digest": digest, "process": process}).one()
    known = before if before is not None or row.before is None else bytes(row.before)
    return bool(row.known if known in (None, digest) else row.newest)


def note_file(connection: Connection, digest: bytes) -> None:
    """Note that a file has been put into force."""
    connection.execute(_NOTE_FILE, {"digest": digest})
