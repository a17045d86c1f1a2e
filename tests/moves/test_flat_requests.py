"""A flat request means the same in SQL as in JSON lines and over HTTP; so does a graph of flat nodes."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from leasehold.errors import BadInput
from pydantic import ValidationError
from pydantic_core import to_json

from schema import fields, requests
from schema.moves.graphs import submit_graph
from schema.moves.submit import submit
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.requests import GraphRequest, JobRequest, NodeRequest
from tests.support.requests import REFUSED, ROWS, TAKEN, complete, refusal, samples, written

NORMAL = Statement(
    "SELECT normal_requests(CAST(:requests AS jsonb), :place)::text AS made, CAST(:wanted AS jsonb)::text"
)
SUBMIT = Statement("SELECT * FROM leasehold.submit(CAST(:requests AS jsonb))")
ALONE = Statement("SELECT * FROM submit_alone(CAST(:requests AS jsonb)->0, 'sql')")
FLATTENED = Statement("SELECT normal_requests(flat_requests(CAST(:requests AS jsonb), :place), :place)::text")
GRAPH = Statement("SELECT * FROM leasehold.submit_graph(CAST(:request AS jsonb), 't')")
GRAPHS = Statement("""
SELECT to_jsonb(g) - '{id,public_id,instance}'::text[] AS graph,
    (SELECT jsonb_agg(to_jsonb(n) - '{job_id,graph}'::text[] ORDER BY n.node_no) FROM graph_nodes n) AS nodes,
    (SELECT jsonb_agg(e.on_failure ORDER BY e.parent, e.child) FROM graph_edges e) AS edges
FROM graphs g
""")


def test_every_field_of_a_request_is_among_the_samples() -> None:
    assert set(TAKEN) == set(JobRequest.model_fields)
    assert set(REFUSED) == set(JobRequest.model_fields) | {"comand", "payload", "urgency"}


def test_a_flat_request_leaves_the_rows_of_the_nested_one(database: Database) -> None:
    for name, flat in samples(TAKEN).items():
        nested = JobRequest(**flat).normal()
        one = json.dumps([flat])
        ways: list[Callable[[Connection], Any]] = [
            lambda c, n=nested: submit(c, [n], actor="sql"),  # type: ignore[misc]
            lambda c, r=one: c.execute(SUBMIT, {"requests": r}),  # type: ignore[misc]
            lambda c, r=one: c.execute(ALONE, {"requests": r}),  # type: ignore[misc]
        ]
        first, *others = written(database, *ways)
        assert (name, len(first)) == (name, 1)
        assert (name, others) == (name, [first] * 2)


def test_a_batch_of_flat_requests_leaves_the_rows_of_the_nested_ones(database: Database) -> None:
    flats = [complete(change) for found in TAKEN.values() for change in found if not change.keys() & {"dedup_key"}]
    flats = [flat for flat in flats if flat.get("key") is None]
    nested = [JobRequest(**flat).normal() for flat in flats]
    first, other = written(
        database,
        lambda c: submit(c, nested, actor="sql"),
        lambda c: c.execute(SUBMIT, {"requests": json.dumps(flats)}),
    )
    assert len(first) == len(flats)
    assert other == first


def test_any_mixture_of_fields_is_the_same_request_or_refused_alike(database: Database, chance: random.Random) -> None:
    every = [change for found in TAKEN.values() for change in found]
    flats: list[dict[str, Any]] = []
    for _ in range(400):
        changes = chance.sample(every, chance.randrange(1, 9))
        flats.append({name: value for change in [{"command": ["true"]}, *changes] for name, value in change.items()})
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    refused_flats: list[tuple[dict[str, Any], str]] = []
    for flat in flats:
        try:
            taken.append((flat, JobRequest(**flat).normal()))
        except BadInput as refused:
            refused_flats.append((flat, str(refused)))
    assert taken
    assert refused_flats
    for _, normal in taken:
        stored = json.loads(json.dumps(normal))
        assert JobRequest.model_validate(requests.flat(stored)).normal() == normal, "the nested form means the same"
    for flat, reason in refused_flats:
        given = {"requests": json.dumps([flat]), "place": "jobs", "wanted": "{}"}
        assert refusal(database, NORMAL, given) == f"jobs.0.{reason}"
    values = {
        "requests": json.dumps([flat for flat, _ in taken]),
        "wanted": to_json([normal for _, normal in taken]).decode(),
        "place": "jobs",
    }
    made, wanted = database.run(lambda connection: connection.execute(NORMAL, values).one())
    assert json.loads(made) == json.loads(wanted)
    assert made == wanted


def test_a_thousand_jobs_with_a_time_zone_are_taken_within_the_time_of_a_statement(database: Database) -> None:
    """To list the zones of the server takes as long as to submit hundreds of jobs."""
    flats = [complete({"preferred_zone": "Europe/Berlin", "preferred_hours": [1]})] * 1000
    rows = database.run(lambda c: c.execute(SUBMIT, {"requests": json.dumps(flats)}).all())
    assert len(rows) == 1000
    said = refusal(database, SUBMIT, {"requests": json.dumps([*flats[:2], flats[0] | {"preferred_zone": "Mars/Base"}])})
    assert said.startswith("jobs.2.preferred_zone: 'Mars/Base' is not a time zone")


def test_a_key_is_the_same_request_in_either_form(database: Database) -> None:
    flat = complete({"key": "k", "timeout_seconds": 60, "locks": ["b", "a"], "job_class": "random"})
    (first,) = database.run(lambda c: submit(c, [JobRequest(**flat).normal()], actor="t"))
    again = database.run(lambda c: c.execute(SUBMIT, {"requests": json.dumps([flat])}).one())
    assert (again.job_id, again.created, again.same) == (first.job_id, False, True)
    other = database.run(lambda c: c.execute(SUBMIT, {"requests": json.dumps([flat | {"units": 2}])}).one())
    assert (other.job_id, other.same) == (first.job_id, False)


NODES: list[dict[str, Any]] = [
    {"node": 1, "after": [], "priority": 3, "locks": ["a"], "timeout_seconds": 5},
    {"node": 2, "after": [1], "job_class": "random", "instance": None},
    {
        "node": 3,
        "after": [{"node": 1}, {"node": 2, "on_failure": "run"}, {"node": 9, "on_failure": None}],
        "priority": 91,
    },
]
#: Nodes of which each ends, if those that depend on it are cancelled with it.
ENDING = [{"command": ["true"]} | node for node in (NODES[0], NODES[1], {"node": 3, "after": [1, 2]})]
FLAT_GRAPH = {"name": "build", "key": "k", "nodes": [{"command": ["true"]} | node for node in NODES]}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"priority": 7, "instance": "ci", "on_failure": "cancel", "on_phantom": "ignore"},
        {"fair_share": True},
        {"fair_share": False},
        {"on_failure": "cancel", "nodes": ENDING, "callback": {"command": ["tell"], "env": {"A": "b"}, "on": "failed"}},
        {"nodes": ENDING[:1], "callback": {"command": ["tell"], "on": "succeeded", "priority": 3}},
        {"nodes": ENDING[:1], "callback": None},
    ],
)
def test_a_graph_of_flat_nodes_leaves_the_rows_of_the_nested_one(database: Database, change: dict[str, Any]) -> None:
    flat = FLAT_GRAPH | change
    nested = GraphRequest.model_validate(flat).normal()
    nodes = [node for node in nested["nodes"] if "callback" not in node]
    mixed = flat | {"nodes": [flat["nodes"][0], *nodes[1:]]}
    ways: list[Callable[[Connection], Any]] = [
        lambda c: submit_graph(c, nested, sync=1, actor="t"),
        lambda c: c.execute(GRAPH, {"request": json.dumps(flat)}),
        lambda c: c.execute(GRAPH, {"request": to_json(mixed).decode()}),
    ]
    for query in (GRAPHS, ROWS):
        first, *others = written(database, *ways, query=query)
        assert first
        assert [_plain(each) for each in others] == [_plain(first)] * 2


def _plain(rows: Any) -> Any:
    """Rows without the number of their graph, which no two have in common."""
    found = json.loads(to_json(rows, fallback=repr, bytes_mode="base64"))
    for row in found:
        for part in row:
            if isinstance(part, dict):
                part.pop("graph", None)
    return found


BAD_GRAPHS: list[dict[str, Any]] = [
    *({"callback": bad} for bad in (1, "x", [])),
    {"callback": {"command": ["x"]}},
    {"nodes": ENDING, "callback": {"command": ["x"]}},
    {"nodes": [ENDING[0] | {"node": 2147483647}], "callback": {"command": ["x"]}},
    *(
        {"nodes": ENDING[:1], "callback": {"command": ["x"]} | bad}
        for bad in (
            *({"on": "x"}, {"on": None}, {"on": 1}, {"node": 3}, {"after": [1]}, {"key": "k"}, {"dedup_key": "k"}),
            *({"command": []}, {"command": [""]}, {"units": 0}, {"model": "m"}, {"more": 1}),
        )
    ),
    *({"name": bad} for bad in (1, "B")),
    *(
        {"instance": "CI"},
        {"key": ""},
        {"priority": 1001},
        {"priority": "x"},
        {"on_failure": "x"},
        {"on_phantom": None},
        {"more": 1},
    ),
    *({"fair_share": bad} for bad in (1, "true", None)),
    {"priority": 10**12},
    *({"nodes": bad} for bad in ([], 5, {}, None, [5], [{}], [{"node": 1}], [[]])),
    {"nodes": [{"node": 1, "payload": {}}]},
    {"nodes": [FLAT_GRAPH["nodes"][0], {"node": 2}]},
    {"nodes": [{"command": ["true"]} | NODES[0], complete({})]},
    *(
        {"nodes": [{"payload": {"command": ["true"]}} | bad]}
        for bad in ({}, {"node": "x"}, {"node": 2**31}, {"node": -1})
    ),
    {"nodes": [{"payload": {"command": ["true"]}, "node": 1, "key": "k"}]},
    {"nodes": [{"payload": {"command": "true"}, "node": 1}]},
    *(
        {"nodes": [{"command": ["true"], "node": 2}, {"node": 1, "payload": {"command": ["true"]}} | bad]}
        for bad in (
            *({"payload": bad} for bad in (5, [], {"env": {}}, {"command": [1]}, {"command": ["a"], "more": 1})),
            *({"payload": {"command": ["a"], "env": bad}} for bad in (5, {"A": 1}, {"a=": "b"})),
            *({"payload": {"command": ["a"], "stdin": "x" * 300_000}}, {"payload": {"command": ["a"], "max_lost": 0}}),
            *({"terms": bad} for bad in (5, {"locks": ["B"]}, {"graph": "1"}, {"model": "m"}, {"owner": 1})),
            *({"own": bad} for bad in ([], {"level": "B"}, {"project": True}, {"fixed": True}, {"more": True})),
            *({"units": 0}, {"label": 5}, {"after": [{}]}, {"callback": "done"}, {"command": ["x"]}),
            *({"units": 2, "terms": {"units": 3}}, {"own": {"class": "a"}, "terms": {"job_class": "b"}}),
        )
    ),
    *(
        {"nodes": [{"command": ["true"], "node": 1} | bad]}
        for bad in (
            *({"node": -1}, {"node": "1"}, {"instance": "x"}, {"key": "k"}, {"dedup_key": "d"}, {"more": 1}),
            *({"after": bad} for bad in (1, ["x"], [-1], [{}], [{"node": 2, "more": 1}], [2, 3, {"node": 3}])),
            *({"after": [{"node": 2, "on_failure": "x"}]}, {"units": 0}, {"model": "m"}, {"command": []}),
        )
    ),
]


def test_a_graph_is_refused_in_sql_with_the_words_of_python(database: Database) -> None:
    for change in BAD_GRAPHS:
        flat = FLAT_GRAPH | change
        with pytest.raises((ValidationError, BadInput)) as refused:
            GraphRequest.model_validate(flat).normal()
        invalid = isinstance(refused.value, ValidationError)
        said = fields.first_refusal(refused.value) if invalid else str(refused.value)
        assert (change, refusal(database, GRAPH, {"request": json.dumps(flat)})) == (change, said)


def test_every_field_of_a_node_is_taken_in_sql(database: Database) -> None:
    flats = [
        {"command": ["true"], "node": n} | change
        for n, change in enumerate(change for field, found in TAKEN.items() for change in found)
        if not any(change.get(field) is not None for field in ("instance", "key", "dedup_key"))
    ]
    nested = [NodeRequest.model_validate(flat).normal() for flat in flats]
    assert GraphRequest.model_validate({"name": "g", "nodes": nested}).normal()["nodes"] == nested
    values = {"requests": json.dumps(flats), "wanted": to_json(nested).decode(), "place": "nodes"}
    made, wanted = database.run(lambda connection: connection.execute(NORMAL, values).one())
    assert json.loads(made) == json.loads(wanted)
    assert made == wanted
    again = database.run(lambda c: c.execute(FLATTENED, {"requests": wanted, "place": "nodes"}).scalar_one())
    assert again == wanted, "what is in the form in which requests are stored stays as it is"
