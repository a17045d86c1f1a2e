"""What assigner and gateway processes tell of themselves: signs of life, settings in force, sampled decisions.

A process writes its settings when it starts and when they change, and a sign of life every few seconds. An assigner
process samples a few of its decisions, each with all that the strategy saw. Nothing is decided by these rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.timing import DEAD_AFTER

#: Sampled decisions that are kept of each assigner process, the newest.
KEPT_DECISIONS = 20
#: The most decisions in one answer.
MAX_DECISIONS = 200
#: The most characters of the reason for which a configuration was refused.
MAX_ERROR = 2000


class Kind(StrEnum):
    """What a process is."""

    ASSIGNER = "assigner"
    GATEWAY = "gateway"


# `settings_at` stays as it is if a process writes the same settings again, also after a restart.
_SET_CONFIGURATION = """p SET config_file = :file, config_error = :error, settings = n.settings, policy = :policy,
    policy_file = :policy_file,
    settings_at = CASE WHEN p.settings IS DISTINCT FROM n.settings OR p.config_file IS DISTINCT FROM :file
        THEN clock_timestamp() ELSE p.settings_at END
FROM (SELECT CAST(:settings AS jsonb) AS settings) n WHERE p.name = :name
"""
_CONFIGURED = {
    Kind.ASSIGNER: Statement(f"UPDATE assigners {_SET_CONFIGURATION}"),
    Kind.GATEWAY: Statement(f"UPDATE gateways {_SET_CONFIGURATION}"),
}
_GATEWAY_SEEN = Statement("""
INSERT INTO gateways AS g (name, url, figures) VALUES (:name, :url, CAST(:figures AS jsonb))
ON CONFLICT (name) DO UPDATE SET url = :url, figures = CAST(:figures AS jsonb), seen_at = clock_timestamp(),
    stopped_at = NULL, started_at = CASE WHEN :starts THEN clock_timestamp() ELSE g.started_at END
""")
_GATEWAY_STOPPED = Statement("UPDATE gateways SET stopped_at = clock_timestamp() WHERE name = :name")
_GATEWAYS = Statement("""
SELECT name, url, CASE WHEN stopped_at IS NOT NULL THEN 'stopped'
        WHEN seen_at < clock_timestamp() - make_interval(secs => :dead_after) THEN 'dead' ELSE 'running' END AS state,
    started_at, seen_at, stopped_at, figures
FROM gateways WHERE name > :after ORDER BY name LIMIT :limit
""")
# The processes with the same settings from the same file are one row.
_SETTINGS = Statement("""
SELECT kind, config_file, config_error, settings, max(settings_at) AS settings_at,
    array_agg(name ORDER BY name) AS processes
FROM (
    SELECT 'assigner' AS kind, name, config_file, config_error, settings, settings_at, seen_at, stopped_at
    FROM assigners
    UNION ALL
    SELECT 'gateway', name, config_file, config_error, settings, settings_at, seen_at, stopped_at FROM gateways
) p
WHERE settings IS NOT NULL AND stopped_at IS NULL AND seen_at >= clock_timestamp() - make_interval(secs => :dead_after)
GROUP BY kind, config_file, config_error, settings ORDER BY kind, max(settings_at) DESC LIMIT :limit
""")
_DECIDED = Statement("""
INSERT INTO decision_samples (assigner, job, bot, policy, seen)
VALUES (:assigner, :job, :bot, CAST(:policy AS jsonb), CAST(:seen AS jsonb))
""")
_ONLY_NEWEST = Statement("""
DELETE FROM decision_samples WHERE assigner = :assigner AND id <= (
    SELECT id FROM decision_samples WHERE assigner = :assigner ORDER BY id DESC OFFSET :kept LIMIT 1)
""")
_DECISIONS = Statement("""
SELECT id, at, assigner, job, bot, policy, seen FROM decision_samples
WHERE (CAST(:before AS bigint) IS NULL OR id < :before) AND (CAST(:id AS bigint) IS NULL OR id = :id)
ORDER BY id DESC LIMIT :limit
""")
_FORGET = (
    Statement("DELETE FROM decision_samples WHERE at < now() - make_interval(secs => :age)"),
    Statement("DELETE FROM gateways WHERE seen_at < now() - make_interval(secs => :age)"),
)


@dataclass(frozen=True)
class Configuration:
    """The configuration of a process.

    file: None = defaults. settings: those in force, as JSON values without secrets. error: why a changed file was
    refused; None if it was not. policy: the version by which it works. policy_file: digest of what its file says of
    the policy.
    """

    file: str | None
    settings: Mapping[str, Any]
    error: str | None = None
    policy: int | None = None
    policy_file: bytes | None = None


@dataclass(frozen=True)
class GatewayProcess:
    """One gateway process. state: running, stopped, or dead (not seen for a minute). figures: what it said last."""

    name: str
    url: str
    state: str
    started_at: datetime
    seen_at: datetime
    stopped_at: datetime | None
    figures: dict[str, Any]


@dataclass(frozen=True)
class SettingsInForce:
    """The settings that live processes of one kind share; settings_at: since when the last of them has had these."""

    kind: str
    processes: list[str]
    config_file: str | None
    config_error: str | None
    settings_at: datetime
    settings: dict[str, Any]


@dataclass(frozen=True)
class DecisionRow:
    """A sampled decision as it is stored. policy: the settings by which it was made. seen: the job and candidates."""

    id: int
    at: datetime
    assigner: str
    job: UUID
    bot: str
    policy: dict[str, Any]
    seen: dict[str, Any]


def record_configuration(connection: Connection, kind: Kind, name: str, configuration: Configuration) -> None:
    """Store the configuration of a process that has given a sign of life before."""
    error = configuration.error
    values = {
        "name": name,
        "file": configuration.file,
        "settings": json.dumps(configuration.settings),
        "error": None if error is None else error[:MAX_ERROR],
        "policy": configuration.policy,
        "policy_file": configuration.policy_file,
    }
    connection.execute(_CONFIGURED[kind], values)


def record_gateway_alive(
    connection: Connection, name: str, *, url: str, figures: Mapping[str, Any], starts: bool = False
) -> None:
    """Record that a gateway process is alive, and what it says of itself."""
    values = {"name": name, "url": url, "figures": json.dumps(figures), "starts": starts}
    connection.execute(_GATEWAY_SEEN, values)


def record_gateway_stopped(connection: Connection, name: str) -> None:
    """Record that a gateway process has ended."""
    connection.execute(_GATEWAY_STOPPED, {"name": name})


def gateways(connection: Connection, *, after: str = "", limit: int) -> list[GatewayProcess]:
    """Return up to `limit` gateway processes of the last day whose names come after `after`, by name."""
    rows = connection.execute(_GATEWAYS, {"after": after, "limit": limit, "dead_after": DEAD_AFTER})
    return [GatewayProcess(**row._asdict()) for row in rows]


def settings_in_force(connection: Connection, *, limit: int) -> list[SettingsInForce]:
    """Return up to `limit` different settings of live processes, by kind, the latest changed first."""
    rows = connection.execute(_SETTINGS, {"limit": limit, "dead_after": DEAD_AFTER})
    return [SettingsInForce(**row._asdict()) for row in rows]


def record_decision(
    connection: Connection, assigner: str, *, job: str, bot: str, policy: Mapping[str, Any], seen: Mapping[str, Any]
) -> None:
    """Store a sampled decision of an assigner process, and delete its oldest beyond `KEPT_DECISIONS`."""
    values = {"assigner": assigner, "job": job, "bot": bot, "policy": json.dumps(policy), "seen": json.dumps(seen)}
    connection.execute(_DECIDED, values)
    connection.execute(_ONLY_NEWEST, {"assigner": assigner, "kept": KEPT_DECISIONS})


def decisions(connection: Connection, *, before: int | None = None, limit: int) -> Sequence[DecisionRow]:
    """Return up to `limit` sampled decisions, newest first; `before`: only those with a lower id."""
    rows = connection.execute(_DECISIONS, {"before": before, "limit": limit, "id": None})
    return [DecisionRow(**row._asdict()) for row in rows]


def decision(connection: Connection, id: int | None) -> DecisionRow | None:
    """Return the sampled decision with this id, or the newest if it is None; None if there is no such decision."""
    row = connection.execute(_DECISIONS, {"before": None, "limit": 1, "id": id}).one_or_none()
    return None if row is None else DecisionRow(**row._asdict())


def forget(connection: Connection, *, age: float) -> None:
    """Delete decisions older than `age` seconds, and gateway processes that were not seen for so long."""
    for statement in _FORGET:
        connection.execute(statement, {"age": age})
