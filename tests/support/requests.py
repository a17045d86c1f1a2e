"""Accepted and refused samples of every field of a request, and the rows or the refusal that a submit leads to."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement

#: A request that uses most of its fields.
FULL: dict[str, Any] = {
    "command": ["make", "-j"], "env": {"A": "1"}, "stdin": "", "instance": "ci",
    "properties": {"os": "linux", "arch": ["x86", "arm", "x86"]}, "key": "k", "priority": -3, "units": 2,
    "label": "nightly", "locality_hint": "core", "timeout_seconds": 60, "queue_timeout_seconds": 3600,
    "dedup_key": "nightly", "max_attempts": 7, "retry_failed": True,
}  # fmt: skip
#: A time that is soon, and two ways to write its offset and fraction.
SOON = datetime.now(UTC) + timedelta(days=3)
SAME_MOMENT = (".25Z", ".250000+00:00")
#: A context of a trace.
TRACE = f"00-{'10' * 16}-{'20' * 8}-0f"
#: Field → accepted samples, each with the other fields that it needs.
TAKEN: Mapping[str, list[dict[str, Any]]] = {
    "command": [{"command": ["make", "-j", "é\n\x7f"]}],
    "env": [{"env": {}}, {"env": {"A": "1", "Ü": ""}}],
    "stdin": [{"stdin": None}, {"stdin": ""}, {"stdin": "line\n"}],
    "retry": [
        {"retry": None},
        {"retry": {}, "retry_failed": True},
        {"retry": {"base": 2, "factor": 1.5, "cap": 600, "jitter": 1}, "retry_failed": True},
        {"retry": {"exceptions": ["TimeoutError", "É"], "exit_codes": [75, 3]}, "retry_failed": True},
    ],
    "max_lost": [{"max_lost": None}, {"max_lost": 10}],
    "instance": [{"instance": None}, {"instance": "ci"}],
    "properties": [{"properties": {}}, {"properties": {"os": "linux", "arch": ["x86", "Arm", "é", "x86", "arm"]}}],
    "key": [{"key": None}, {"key": "k"}],
    "priority": [{"priority": 0}, {"priority": -1000}],
    "units": [{"units": 1}, {"units": 3}],
    "label": [{"label": ""}, {"label": "nightly"}],
    "locality_hint": [{"locality_hint": None}, {"locality_hint": "core"}],
    "timeout_seconds": [{"timeout_seconds": None}, {"timeout_seconds": 60}, {"timeout_seconds": 0.25}],
    "queue_timeout_seconds": [{"queue_timeout_seconds": 3600}, {"queue_timeout_seconds": 1e-5}],
    "dedup_key": [{"dedup_key": None}, {"dedup_key": "d"}],
    "locks": [{"locks": []}, {"locks": ["b", "a.c", "a-c", "b", "c:2"]}],
    "estimated_cost": [{"estimated_cost": 0}, {"estimated_cost": 1e12}, {"estimated_cost": 1.50}],
    "resource_class": [{"resource_class": "gpu"}],
    "model": [{"resource_class": "gpu", "model": "large"}],
    "graph_priority": [{"graph_priority": 7}],
    "job_class": [{"job_class": "critical"}, {"job_class": "random", "priority": 5}],
    "user_priority": [{"job_class": "random", "user_priority": 2}, {"job_class": "random", "user_priority": 0}],
    "project": [{"project": "alpha"}, {"job_class": "random", "project": "alpha"}],
    "owner": [{"owner": "ann"}],
    "service_level": [
        {"service_level": "premium"},
        {"service_level": "premium", "priority": 3},
        {"service_level": "economy", "job_class": "random", "timeout_seconds": 9},
    ],
    "deadline_seconds": [{"deadline_seconds": 500}, {"deadline_seconds": 500.5, "service_level": "premium"}],
    "estimated_seconds": [{"estimated_seconds": 12}],
    "resources": [{"resources": {}}, {"resources": {"cpu_milli": 500, "gpu_milli": 1}, "units": 2}],
    "batch_key": [{"batch_key": "b"}],
    "preferred_hours": [{"preferred_hours": []}, {"preferred_hours": [22, 3, 22]}],
    "preferred_zone": [
        {"preferred_zone": "Europe/Berlin", "preferred_hours": [1, 2]},
        {"preferred_zone": "Asia/Tokyo", "preferred_hours": [1]},
    ],
    "max_attempts": [{"max_attempts": 7}],
    "retry_failed": [{"retry_failed": True}],
    "preferred_properties": [
        {"preferred_properties": {}},
        {"preferred_properties": {"zone": "b", "disk": ["ssd", "nvme", "ssd"]}},
        {"preferred_properties": {"os": "linux", "arch": "arm"}, "properties": {"os": "linux", "arch": "x86"}},
        {"preferred_properties": {"os": "linux"}, "properties": {"os": ["linux"]}},
    ],
    "prefer_seconds": [
        {"preferred_properties": {"zone": "b"}, "prefer_seconds": 30},
        {"preferred_properties": {"os": "linux"}, "properties": {"os": "linux"}, "prefer_seconds": 0.5},
    ],
    "metadata": [
        {"metadata": {}},
        {"metadata": {"build": "1234", "target://a/b": "", "note": "é=1"}},
        {"metadata": {"k" * 64: "v" * 256}},
        {"metadata": {"traceparent": TRACE}},
        {"metadata": {"traceparent": TRACE}, "env": {"A": "1"}},
        {"metadata": {"traceparent": TRACE}, "env": {"TRACEPARENT": "mine"}},
        {"metadata": {"traceparent": f"01{TRACE[2:]}-more"}},
    ],
    "schedule_after": [
        {"schedule_after": None},
        {"schedule_after": "2024-02-29 23:59Z"},
        *({"schedule_after": f"{SOON:%Y-%m-%dT%H:%M:%S}{end}", "queue_timeout_seconds": 60} for end in SAME_MOMENT),
    ],
    "delay": [{"delay": 0}, {"delay": 3600}, {"delay": 90.5, "queue_timeout_seconds": 60}],
    "on_conflict": [{"on_conflict": None}, *({"dedup_key": "d", "on_conflict": way} for way in ("join", "refuse"))],
    "unique_for": [{"unique_for": None}, {"dedup_key": "d", "unique_for": 3600, "on_conflict": "replace"}],
    "debounce": [{"debounce": None}, {"dedup_key": "d", "debounce": 2.5, "on_conflict": "replace"}],
    "debounce_max": [{"debounce_max": None}, {"dedup_key": "d", "debounce": 5, "debounce_max": 5}],
}
#: Field → refused samples.
REFUSED: Mapping[str, list[dict[str, Any]]] = {
    "command": [
        *({"command": bad} for bad in (None, "true", [], [""], ["a", 1], [["a"]], ["a"] * 4097, ["x" * 262_145])),
        {"command": ["a"], "env": {"A": "x" * 200_000}, "stdin": "y" * 100_000},
    ],
    "env": [{"env": bad} for bad in (None, [], {"A": 1}, {"": "1"}, {"A=": "1"}, {"A": ["1"]}, {"A": "x" * 262_145})],
    "stdin": [{"stdin": 1}, {"stdin": "é" * 131_073}],
    "retry": [
        {"retry": {}},
        *({"retry": bad, "retry_failed": True} for bad in (1, [], {"base": 0}, {"base": "1"})),
        *({"retry": {name: bad}, "retry_failed": True} for name, bad in (("factor", 0.5), ("jitter", 2), ("cap", 1e9))),
        *({"retry": {"exit_codes": bad}, "retry_failed": True} for bad in (1, [0], [256], ["1"], [1] * 21)),
        *({"retry": {"exceptions": bad}, "retry_failed": True} for bad in ("E", [1], ["é" * 33])),
    ],
    "max_lost": [{"max_lost": bad} for bad in (0, 101, "1", 1.5)],
    "instance": [{"instance": 1}, {"instance": ""}, {"instance": "CI"}, {"instance": "ci\n"}],
    "properties": [
        *({"properties": bad} for bad in (None, [], {"k": 1}, {"k": None}, {"k": ["a", 1]}, {"k": [["a"]]}, {"k": []})),
        *({"properties": bad} for bad in ({"k": ""}, {"k": ["a", ""]}, {"": "a"}, {"k": "x" * 1024})),
        {"properties": {str(n): "a" for n in range(65)}},
        {"properties": {"leasehold.farm": "action"}},
    ],
    "key": [{"key": 1}, {"key": ""}, {"key": "é" * 101}],
    "priority": [{"priority": bad} for bad in (None, "0", True, 1.0, 1001, -1001)],
    "units": [{"units": bad} for bad in (None, 0, 1_000_001, 10**30)],
    "label": [{"label": None}, {"label": "é" * 33}],
    "locality_hint": [{"locality_hint": ""}, {"locality_hint": "h" * 201}],
    "timeout_seconds": [{"timeout_seconds": bad} for bad in ("1", True, 0, -1.5, 31_536_001)],
    "queue_timeout_seconds": [{"queue_timeout_seconds": bad} for bad in (0, 1e300)],
    "dedup_key": [{"dedup_key": each} for each in ("", "d" * 201, "a:")] + [{"dedup_key": "d", "job_class": "random"}],
    "locks": [
        {"locks": bad}
        for bad in (None, "a", ["A"], [1], [["a"]], [f"a{n}" for n in range(17)], ["a:0"], ["a:1", "a:2"], ["a", "a:1"])
    ],
    "estimated_cost": [{"estimated_cost": -0.5}, {"estimated_cost": 1e13}],
    "resource_class": [{"resource_class": "Ü"}],
    "model": [{"model": "m"}],
    "graph_priority": [{"graph_priority": 0}, {"graph_priority": 1001}],
    "job_class": [{"job_class": 5}],
    "user_priority": [
        *({"user_priority": 1}, {"user_priority": 1, "priority": 91}, {"job_class": "random", "user_priority": 11}),
    ],
    "project": [{"project": ""}],
    "owner": [{"owner": []}],
    "service_level": [
        *({"service_level": {}}, {"service_level": "premium", "dedup_key": "d"}),
        {"service_level": "premium", "dedup_key": "d", "priority": 91},
    ],
    "urgency": [{"urgency": 90}],
    "deadline_seconds": [{"deadline_seconds": 0}],
    "estimated_seconds": [{"estimated_seconds": "1"}],
    "resources": [{"resources": bad} for bad in (None, [], {"cpu": 1}, {"cpu_milli": 0}, {"cpu_milli": 0.5})],
    "batch_key": [{"batch_key": "-"}],
    "preferred_hours": [{"preferred_hours": bad} for bad in (None, 1, [24], [-1], [True], [0] * 25)],
    "preferred_zone": [
        *({"preferred_zone": bad} for bad in (None, "Europe/Nowhere", "europe/berlin", "posix/UTC", "Europe/Berlin")),
        {"preferred_zone": "UTC", "preferred_hours": []},
    ],
    "max_attempts": [{"max_attempts": 0}, {"max_attempts": 101}],
    "retry_failed": [{"retry_failed": 1}],
    "preferred_properties": [{"preferred_properties": bad} for bad in (None, [], {"k": 1}, {"k": []}, {"": "a"})]
    + [{"preferred_properties": {"leasehold.farm": "action"}}],
    "prefer_seconds": [
        {"prefer_seconds": 5},
        {"prefer_seconds": 5, "preferred_properties": {}},
        *({"prefer_seconds": bad, "preferred_properties": {"zone": "b"}} for bad in (0, "1", 31_536_001)),
    ],
    "metadata": [
        *({"metadata": bad} for bad in (None, [], {"b": 1}, {"b": None}, {"b": ["a"]}, {"": "a"}, {"a b": "c"})),
        *({"metadata": bad} for bad in ({"k" * 65: "a"}, {"k": "é" * 129}, {str(n): "a" for n in range(17)})),
        *({"metadata": {"traceparent": bad}} for bad in ("", f"{TRACE}-more", f"ff{TRACE[2:]}", TRACE.upper())),
        *({"metadata": {"traceparent": bad}} for bad in (TRACE.replace("1", "0"), TRACE.replace("2", "0"))),
    ],
    "schedule_after": [
        *({"schedule_after": bad} for bad in (1, "", "tomorrow", "2026-12-01T10:00:00", "2023-02-29T10:00Z")),
        *({"schedule_after": f"2026-12-01T{bad}"} for bad in ("10:00:00+1", "24:00Z", "10:00:60Z", "10:00:00+15:00")),
        *(
            {"schedule_after": bad}
            for bad in ("2999-12-01T10:00Z", "2026-12-01T10:00:00.1234567Z", "٢026-12-01T10:00Z")
        ),
    ],
    "delay": [{"delay": bad} for bad in (-1, "1", True, 31_536_001)]
    + [{"delay": 1, "schedule_after": "2026-12-01T10:00Z"}],
    "on_conflict": [{"on_conflict": "join"}, *({"dedup_key": "d", "on_conflict": bad} for bad in (1, "", "skip"))],
    "unique_for": [{"unique_for": 5}, *({"dedup_key": "d", "unique_for": bad} for bad in (0, "1h", 31_536_001))],
    "debounce": [
        {"debounce": 5},
        *({"dedup_key": "d", "debounce": 5} | more for more in ({"delay": 1}, {"on_conflict": "join"})),
        *({"dedup_key": "d", "debounce": bad} for bad in (0, True)),
    ],
    "debounce_max": [{"dedup_key": "d", "debounce_max": 5}, {"dedup_key": "d", "debounce": 5, "debounce_max": 4}],
    "comand": [{"comand": ["true"]}],
    "payload": [{"payload": {}}],
}
ROWS = Statement("""
SELECT i.name, p.properties, w.properties AS preferred, r.properties AS required, v.seconds, v.until, g.terms,
    y.payload, e.details, k.key, k.request_hash,
    to_jsonb(j) - '{id,public_id,queue,instance,platform,preferred}'::text[] AS job, to_jsonb(t) - 'job_id' AS own,
    (SELECT jsonb_object_agg(m.key, m.value) FROM job_metadata m WHERE m.job_id = j.id AND m.instance = j.instance)
FROM jobs j JOIN instances i ON i.id = j.instance JOIN queues q ON q.id = j.queue JOIN platforms p ON p.id = j.platform
LEFT JOIN platforms w ON w.id = j.preferred LEFT JOIN platforms r ON r.id = q.required
LEFT JOIN preference_waits v ON v.job_id = j.id
LEFT JOIN constraint_sets g ON g.id = q.constraint_set LEFT JOIN job_constraints t ON t.job_id = j.id
LEFT JOIN submit_keys k ON k.job_id = j.id
JOIN job_payloads y ON y.job_id = j.id JOIN job_events e ON e.job_id = j.id ORDER BY j.id
""")


def complete(change: dict[str, Any]) -> dict[str, Any]:
    return {"command": ["true"]} | change


def samples(table: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Complete requests, by the field of the sample and its number."""
    return {f"{field}-{n}": complete(each) for field, found in table.items() for n, each in enumerate(found)}


def written(database: Database, *submits: Callable[[Connection], Any], query: Any = ROWS) -> list[Any]:
    """Rows that each submit alone writes, all in one transaction, so that their times are equal."""

    def work(connection: Connection) -> list[Any]:
        found = []
        for submit in submits:
            with connection.savepoint() as attempt:
                submit(connection)
                found.append([tuple(row) for row in connection.execute(query)])
                attempt.rollback()
        return found

    return database.run(work)


def refusal(database: Database, query: Any, values: dict[str, Any]) -> str:
    with pytest.raises(psycopg.Error) as refused:
        database.run(lambda connection: connection.execute(query, values))
    assert isinstance(refused.value, psycopg.errors.InvalidParameterValue)
    return refused.value.diag.message_primary or ""


# In the form that the functions of the database take

PLAIN: dict[str, Any] = {"instance": "default", "properties": {}, "payload": {"command": ["true"]}}
_FULL: dict[str, Any] = {
    **{name: value for name, value in FULL.items() if name not in ("command", "env", "stdin", "key", "dedup_key")},
    "properties": {"os": ["linux"], "arch": ["arm", "x86"]},
    "timeout_seconds": 60.5,
    "payload": {"command": ["make", "-j"], "env": {"A": "é"}, "stdin": ""},
}
REQUESTS = {
    "plain": PLAIN,
    "nothing but a command": {"payload": {"command": []}},
    "full": _FULL,
    "properties in another form": PLAIN | {"properties": {"os": "linux", "arch": ["x86", "arm", "x86"]}},
    "everything unset": dict.fromkeys(["key", "label", "locality_hint", "timeout_seconds", "priority"]) | PLAIN,
    "a deduplication key": PLAIN | {"dedup_key": "d"},
    "a job it was made from": PLAIN | {"from": "0198c5d2-0000-7000-8000-000000000000"},
    "estimates": PLAIN | {"estimated_seconds": 5.0, "own": {}},
    "numbers as text": PLAIN | {"priority": "5", "retry_failed": "yes"},
    "a label": PLAIN | {"label": "nightly"},
    "a queue timeout": PLAIN | {"queue_timeout_seconds": 60.5},
    "metadata": PLAIN | {"metadata": {"team": "a"}},
    "a preference": PLAIN | {"preferred_properties": {"os": ["linux"]}},
    "a preference for some time": PLAIN | {"preferred_properties": {"os": ["linux"]}, "prefer_seconds": 9.5},
    "constraints": PLAIN | {"terms": {"job_class": "random"}},
}
#: What is stored of a job, but for its ids and times.
STORED = """
SELECT to_jsonb(j) - '{id,public_id,created_at,queued_at,queue_deadline,dedup_key}'::text[] AS job,
    j.queue_deadline - j.created_at AS waits, j.dedup_key IS NOT NULL AS shared, i.name AS instance_name,
    (SELECT jsonb_object_agg(m.key, m.value) FROM job_metadata m WHERE m.job_id = j.id) AS metadata,
    p.properties, w.payload, to_jsonb(e) - '{id,job_id,at}'::text[] AS event
FROM jobs j JOIN instances i ON i.id = j.instance JOIN platforms p ON p.id = j.platform
JOIN job_payloads w ON w.job_id = j.id JOIN job_events e ON e.job_id = j.id
WHERE j.public_id = :id
"""
