"""Who may call what: every route of the gateway's OpenAPI document against every kind of caller.

The table says what is allowed, in words of its own: it is not derived from what the routes declare. A route without a
row fails, and so does a row without a route.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.tenancy import tokens
from schema.timing import Timing
from tests.support.http import granted, submitted
from tests.support.servers import Bot, Served, application

#: Methods, path, and the kinds of tokens that may use it. `{x}` and further parts of a path: see `OF_OPERATORS`.
RULES = """
GET                     /healthz                          anyone
GET                     /readyz                           anyone
GET                     /metrics                          anyone

POST                    /v1/sessions                      bot
POST                    /v1/sync                          bot
POST                    /v1/output                        bot
POST                    /v1/inputs                        bot

GET POST                /v1/jobs                          submitter operator
GET                     /v1/jobs/{id}                     submitter operator
GET                     /v1/jobs/{id}/output              submitter operator
GET                     /v1/jobs/{id}/result              submitter operator
POST                    /v1/results                       submitter operator
GET                     /v1/jobs/{id}/explain             submitter operator
POST                    /v1/jobs/cancel                   submitter operator
POST                    /v1/jobs/wait                     submitter operator
POST                    /v1/jobs/find                     submitter operator
POST                    /v1/jobs/priority                 submitter operator
POST                    /v1/jobs/reschedule               submitter operator
POST                    /v1/jobs/hold                     operator
POST                    /v1/jobs/release                  operator
POST                    /v1/jobs/requeue                  operator
GET POST                /v1/graphs                        submitter operator
GET                     /v1/graphs/{id}                   submitter operator
POST                    /v1/graphs/retry                  submitter operator
POST                    /v1/graphs/cancel                 submitter operator
GET                     /v1/schedules                     submitter operator
GET PUT PATCH DELETE    /v1/schedules/{name}              submitter operator
POST                    /v1/schedules/{name}/run          submitter operator
POST                    /v1/schedules/{name}/plan         submitter operator
POST                    /v1/schedules/apply               submitter operator
GET                     /v1/builds                        submitter operator
GET                     /v1/metadata                      submitter operator
GET                     /v1/metadata/summary              submitter operator
GET                     /v1/status                        submitter operator
GET                     /v1/labels                        submitter operator
GET                     /v1/samples                       submitter operator
GET                     /v1/samples/fairness              operator

GET                     /v1/bots                          operator
GET                     /v1/bots/{name}                   operator
POST                    /v1/bots/{name}/drain             operator
GET POST                /v1/instances/{name}/drain        operator
GET                     /v1/assigners                     operator
GET                     /v1/assigners/{name}              operator
POST                    /v1/assigners/{name}/drain        operator
GET                     /v1/alerts                        operator
GET                     /v1/doctor                        operator
GET                     /v1/invariants                    operator
GET                     /v1/gateways                      operator
GET                     /v1/audit                         operator
GET                     /v1/settings                      operator
GET                     /v1/policies                      operator
GET                     /v1/policies/{number}             operator
GET                     /v1/policies/{number}/diff        operator
POST                    /v1/policies                      operator
GET                     /v1/policies/canary               operator
POST                    /v1/policies/canary/stop          operator
POST                    /v1/policies/{number}/canary      operator
POST                    /v1/policies/{number}/activate    operator
POST                    /v1/policies/rollback             operator
GET                     /v1/policies/shadow               operator
POST                    /v1/policies/shadow/stop          operator
POST                    /v1/policies/{number}/shadow      operator
GET                     /v1/simulations                   operator
GET                     /v1/simulations/{id}              operator
GET                     /v1/decisions                     operator
POST                    /v1/scores                        operator
GET                     /v1/usage                         operator
GET                     /v1/report                        operator
GET                     /v1/preemptions                   operator
GET                     /v1/class-report                  operator
GET                     /v1/demand                        operator
GET                     /v1/demand/value                  operator
GET                     /v1/meters/{name}/pattern         operator
GET                     /v1/forecast                      operator
GET                     /v1/forecasts                     operator
GET PUT PATCH DELETE    /v1/instances/{name}              operator
GET PUT DELETE          /v1/instances/{name}/account      operator
POST                    /v1/instances/{name}/effect       operator
GET                     /v1/accounts                      operator
GET PUT DELETE          /v1/limits                        operator
GET                     /v1/backpressure                  operator
GET PUT DELETE          /v1/scheduling                    operator
GET PUT PATCH DELETE    /v1/quotas/{cohort}/{instance}    operator
POST                /v1/quotas/{cohort}/{instance}/effect operator
"""
#: What operators list, and show, set and remove below its keys.
OF_OPERATORS = """
instances, cohorts/{name}, quotas, owner-quotas/{instance}/{owner}, project-quotas/{instance}/{project},
locks/{instance}/{lock}, rates/{resource}, backpressure/{resource_class}, meters/{name}, queue-limits/{label},
windows/{name}, instance-queue-limits/{instance}, ceilings/{instance}/{label}, submit-rules/{instance},
report-ceilings/{instance}/{unit}, classes/{name}, class-limits/{name}, class-reserves/{name}, service-levels/{name},
pauses/{kind}/{instance}/{name}
"""
#: Callers whose tokens have the right form, so that only the database knows that they are none.
ASKED_OF_THE_DATABASE = {"with an unknown token", "with a revoked token", "with an expired token"}
ABSENT = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0009"
ABSENT_GRAPH = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0008"
#: A body by which the call would do something if it were let in; other calls have none.
BODIES: Mapping[str, dict[str, Any]] = {
    "POST /v1/sessions": {"bot": "intruder"},
    "POST /v1/jobs": {"jobs": [{"command": ["true"]}]},
    "POST /v1/jobs/cancel": {"ids": ["{job}"]},
    "POST /v1/jobs/wait": {"ids": ["{job}"]},
    "POST /v1/results": {"ids": ["{job}"]},
    "POST /v1/jobs/priority": {"ids": ["{job}"], "priority": 5},
    "POST /v1/jobs/reschedule": {"ids": ["{job}"], "delay": 5},
    "POST /v1/jobs/hold": {"ids": ["{job}"]},
    "POST /v1/jobs/release": {"ids": ["{job}"]},
    "POST /v1/jobs/requeue": {"ids": ["{job}"]},
    "POST /v1/graphs": {"name": "g2", "nodes": [{"node": 1, "command": ["true"]}]},
    "POST /v1/graphs/retry": {"graph": "{graph}"},
    "POST /v1/graphs/cancel": {"graph": "{graph}"},
    "POST /v1/bots/{name}/drain": {},
    "POST /v1/instances/{name}/drain": {},
    "PATCH /v1/instances/{name}": {"pool": "stolen"},
    "PUT /v1/instances/{name}": {"pool": "stolen"},
}


# Nothing may have been written if no row of a table is new, gone or another version.
_TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r' AND oid >= 16384 ORDER BY 1"


def expected() -> dict[tuple[str, str], set[str]]:
    """Method and path → the kinds of tokens that may use it."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in filter(None, RULES.splitlines()):
        *methods, path, rest = [*row[:58].split(), row[58:]]
        found |= {(method, path): set(rest.split()) for method in methods}
    return found | {way: {"operator"} for way in of_operators()}


def of_operators() -> list[tuple[str, str]]:
    """The routes of what operators list, show, set and remove."""
    found = []
    for path in OF_OPERATORS.replace(",", " ").split():
        found.append(("GET", f"/v1/{path.partition('/')[0]}"))
        found += [(method, f"/v1/{path}") for method in ("GET", "PUT", "DELETE")] if "/" in path else []
    return found


def written(database: Database) -> dict[str, Any]:
    """Table → its rows as a count and the sum of the transactions that wrote them."""

    def work(connection: Any) -> dict[str, Any]:
        found = {}
        for table in connection.execute(Statement(_TABLES)).scalars():
            sums = Statement(f'SELECT count(*), sum(xmin::text::numeric) FROM "{table}"')
            found[table] = tuple(connection.execute(sums).one())
        return found

    return database.run(work)


@dataclass(frozen=True)
class World:
    """A pool with a waiting job, a running one and a graph of the instance `ours`."""

    served: Served
    database: Database
    bot: Bot
    job: str
    running: str
    fence: int
    graph: str

    def body(self, way: str) -> Any:
        given = json.dumps(BODIES.get(way, {}))
        return json.loads(given.replace("{job}", self.job).replace("{graph}", self.graph))

    def path(self, path: str) -> str:
        found = {"{id}": self.graph if "graphs" in path else self.job, "{name}": "b1" if "bots" in path else "ours"}
        return re.sub(r"\{\w+\}", lambda part: found.get(part[0], f"x{part[0][1:-1]}"), path)


@pytest.fixture
def world(served: Served, database: Database, timing: Timing) -> World:
    with served.client(served.token("submitter", instance="ours")) as http:
        (running,) = submitted(http, {"command": ["true"]})
        bot = Bot(served)
        _, fence = granted(database, timing, running)
        bot.sync()
        (job,) = submitted(http, {"command": ["secret-command"], "metadata": {"team": "ours"}})
        graph = http.post("/v1/graphs", json={"name": "g", "nodes": [{"node": 1, "command": ["true"]}]})
        assert graph.status_code == 200, graph.text
        schedule = http.put("/v1/schedules/ours", json={"cron": "0 3 * * *", "job": {"command": ["secret-command"]}})
        assert schedule.status_code == 200, schedule.text
    return World(served, database, bot, job, running, fence, graph.json()["id"])


@pytest.fixture
def callers(world: World) -> Iterator[dict[str, tuple[str, httpx.Client]]]:
    """Name of a caller → the kind that it may act as, and its way in."""
    served, made = world.served, {}
    revoked, expired, operator = (served.token("operator") for _ in range(3))
    world.database.run(lambda c: tokens.revoke(c, tokens.parse(revoked)))
    ended = Statement("UPDATE tokens SET expires_at = now() - interval '1 s' WHERE id = :id")
    world.database.run(lambda c: c.execute(ended, {"id": tokens.parse(expired)}) and None)
    given = {
        "without a token": ("", None),
        "with garbage": ("", "garbage"),
        "with a typing error": ("", operator[:-1] + ("0" if operator[-1] != "0" else "1")),
        "with an unknown token": ("", _unknown(operator)),
        "with a revoked token": ("", revoked),
        "with an expired token": ("", expired),
        "submitter of the instance": ("submitter", served.token("submitter", instance="ours")),
        "submitter of another instance": ("submitter", served.token("submitter", instance="theirs")),
        "bot of this name": ("bot", served.token("bot", bot="b1")),
        "bot of another pattern": ("bot", served.token("bot", bot="ci-*")),
        "operator": ("operator", operator),
    }
    for name, (kind, token) in given.items():
        made[name] = (kind, served.client(token))
    yield made
    for _, http in made.values():
        http.close()


def _unknown(token: str) -> str:
    """Return a token of the right form and checksum that nobody was given."""
    body = token[:-72] + "0" * 64
    return body + tokens._checksum(body)


def test_every_route_lets_in_whom_the_table_names_and_nobody_else(
    world: World, timing: Timing, callers: Mapping[str, tuple[str, httpx.Client]]
) -> None:
    described = world.served.described()["paths"]
    rules = expected()
    assert {(way.upper(), path) for path, ways in described.items() for way in ways} == set(rules)

    app, resources = application(world.database, timing), {path for _, path in of_operators()}
    refused, let_in = [], []
    for (method, path), allowed in rules.items():
        for name, (kind, http) in callers.items():
            body = world.body(f"{method} {path}")
            call = Call(method, world.path(path), http.headers.get("authorization"), body)
            if kind not in allowed and "anyone" not in allowed:
                if name in ASKED_OF_THE_DATABASE and path in resources:
                    continue  # these routes are made by one function, and a query for each takes seconds
                refused.append((name, 403 if kind else 401, call))
            elif kind != "bot":  # what a bot may do depends on its name too: the last test here
                let_in.append((name, 0, replace(call, body={})))

    before = written(world.database)
    answers = called(app, [call for _, _, call in refused])
    assert [
        (name, call.method, call.path, answer)
        for (name, status, call), answer in zip(refused, answers, strict=True)
        if answer[0] != status or json.loads(answer[1])["status"] != status or b"secret-command" in answer[1]
    ] == []
    assert written(world.database) == before

    answers = called(app, [call for _, _, call in let_in])
    assert [
        (name, call.method, call.path, answer)
        for (name, _, call), answer in zip(let_in, answers, strict=True)
        if answer[0] in (401, 403) or answer[0] >= 500
    ] == []


@dataclass(frozen=True)
class Call:
    """One request. token: the header `Authorization`, if there is one."""

    method: str
    path: str
    token: str | None
    body: Any


def called(app: Any, calls: Sequence[Call]) -> list[tuple[int, bytes]]:
    """Make calls by ASGI, which takes a tenth of the time of HTTP; return statuses and bodies."""

    async def one(call: Call) -> tuple[int, bytes]:
        headers = [(b"content-type", b"application/json")]
        headers += [(b"authorization", call.token.encode())] if call.token else []
        scope = {"type": "http", "method": call.method, "path": call.path, "headers": headers, "query_string": b""}
        sent, answer = [json.dumps(call.body).encode() if call.method != "GET" else b""], list[Any]()

        async def receive() -> Any:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}

        async def send(message: Any) -> None:
            answer.append(message)

        await app({**scope, "http_version": "1.1", "scheme": "http", "state": {}}, receive, send)
        return answer[0]["status"], b"".join(each.get("body", b"") for each in answer[1:])

    async def every() -> list[tuple[int, bytes]]:
        return [await one(call) for call in calls]

    return asyncio.run(every())


SCHEDULE = {"cron": "0 3 * * *", "job": {"command": ["true"]}}
#: What a submitter asks of another instance: method, path and body; `{id}` and `{instance}` are replaced by what exists
#: there, and by what does not exist at all.
FOREIGN: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("GET", "/v1/jobs/{id}", None),
    ("GET", "/v1/jobs/{id}/output", None),
    ("GET", "/v1/jobs/{id}/result", None),
    ("POST", "/v1/results", {"ids": ["{id}"]}),
    ("GET", "/v1/jobs/{id}/explain", None),
    ("GET", "/v1/jobs?before={id}", None),
    ("GET", "/v1/jobs?instance={instance}", None),
    ("POST", "/v1/jobs", {"jobs": [{"command": ["true"], "instance": "{instance}"}]}),
    ("POST", "/v1/jobs/cancel", {"ids": ["{id}"]}),
    ("POST", "/v1/jobs/wait", {"ids": ["{id}"], "wait": 0}),
    ("POST", "/v1/jobs/priority", {"ids": ["{id}"], "priority": 1}),
    ("POST", "/v1/jobs/priority", {"instance": "{instance}", "priority": 1}),
    ("POST", "/v1/jobs/priority", {"where": {"instance": "{instance}"}, "priority": 1}),
    ("POST", "/v1/jobs/reschedule", {"ids": ["{id}"], "delay": 1}),
    ("POST", "/v1/jobs/reschedule", {"where": {"instance": "{instance}"}, "delay": 1}),
    ("POST", "/v1/jobs/cancel", {"where": {"instance": "{instance}"}}),
    ("GET", "/v1/graphs?before={graph}", None),
    ("GET", "/v1/graphs?instance={instance}", None),
    ("GET", "/v1/graphs/{graph}", None),
    ("GET", "/v1/graphs/g?instance={instance}", None),
    ("POST", "/v1/graphs", {"name": "g", "instance": "{instance}", "nodes": [{"node": 1, "command": ["true"]}]}),
    ("POST", "/v1/graphs/retry", {"graph": "{graph}"}),
    ("POST", "/v1/graphs/retry", {"graph": "g", "instance": "{instance}"}),
    ("POST", "/v1/graphs/cancel", {"graph": "{graph}"}),
    ("POST", "/v1/graphs/cancel", {"graph": "g", "instance": "{instance}"}),
    ("GET", "/v1/schedules?instance={instance}", None),
    ("GET", "/v1/schedules/ours?instance={instance}", None),
    ("PUT", "/v1/schedules/ours", {"instance": "{instance}", **SCHEDULE}),
    ("POST", "/v1/schedules/ours/plan", {"instance": "{instance}", **SCHEDULE}),
    ("PATCH", "/v1/schedules/ours?instance={instance}", {"enabled": False}),
    ("DELETE", "/v1/schedules/ours?instance={instance}", None),
    ("POST", "/v1/schedules/ours/run?instance={instance}", {"key": "k"}),
    ("POST", "/v1/schedules/apply", {"app": "a", "schedules": [{"name": "s", "instance": "{instance}", **SCHEDULE}]}),
    ("GET", "/v1/metadata?key=team&instance={instance}", None),
    ("GET", "/v1/builds?instance={instance}", None),
    ("GET", "/v1/samples?scope=instance:{instance}", None),
    ("GET", "/v1/metadata/summary?metadata=team%3Dours&instance={instance}", None),
)
#: Routes of submitters that name no job, graph or instance by its id or name. Short forms have a test of their own.
GENERAL = {("GET", "/v1/status"), ("GET", "/v1/labels"), ("POST", "/v1/jobs/find")}
#: What a submitter lists without saying of which instance.
LISTS = ("/v1/jobs", "/v1/graphs", "/v1/schedules", "/v1/metadata?key=team", "/v1/labels", "/v1/builds")


def alike(
    http: httpx.Client, method: str, path: str, body: dict[str, Any] | None, there: Mapping[str, str]
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Ask for what is there and for what is not; return status and text of both answers, without the ids."""
    absent = {"id": ABSENT, "graph": ABSENT_GRAPH, "instance": "nowhere"}

    def asked(given: Mapping[str, str]) -> tuple[int, str]:
        def fill(pattern: str) -> str:
            for name, value in given.items():
                pattern = pattern.replace(f"{{{name}}}", value)
            return pattern

        answer = http.request(method, fill(path), json=None if body is None else json.loads(fill(json.dumps(body))))
        said = answer.text
        for name, value in given.items():
            said = said.replace(value, name)
        return answer.status_code, said

    return asked(there), asked(absent)


def test_what_belongs_to_another_instance_is_answered_as_what_does_not_exist(
    world: World, callers: Mapping[str, tuple[str, httpx.Client]]
) -> None:
    covered = {(method, _template(path)) for method, path, _ in FOREIGN} | GENERAL
    assert covered == {way for way, allowed in expected().items() if "submitter" in allowed}

    _, http = callers["submitter of another instance"]
    there = {"id": world.job, "graph": world.graph, "instance": "ours"}
    before, wrong = written(world.database), []
    for method, path, body in FOREIGN:
        (status, said), absent = alike(http, method, path, body, there)
        listed = "instance=" in path or "where" in (body or {})
        if (status, said) != absent or status not in ((200, 403, 404) if listed else (403, 404)):
            wrong.append((method, path, status, said, absent))
        if "secret-command" in said or "secret-command" in absent[1]:
            wrong.append((method, path, "tells the command"))
    assert wrong == []
    assert [next(iter(http.get(path).json().values())) for path in LISTS] == [[]] * len(LISTS)
    assert http.get("/v1/metadata/summary?metadata=team%3Dours").json()["jobs"] == {}
    assert written(world.database) == before


def _template(path: str) -> str:
    path = path.partition("?")[0].replace("/v1/schedules/ours", "/v1/schedules/{name}")
    return "/v1/graphs/{id}" if path in ("/v1/graphs/{graph}", "/v1/graphs/g") else path


def test_a_bot_reaches_no_lease_but_its_own(world: World, callers: Mapping[str, tuple[str, httpx.Client]]) -> None:
    """Neither with a token for other names, nor with its own session, nor with a guessed secret."""
    other = Bot(world.served, "ci-1")
    stolen = {"job": world.running, "fence": world.fence, "state": "completed", "outcome": {"verdict": "succeeded"}}
    output = {"job": world.running, "fence": world.fence, "output": [{"start": 0, "data": "aGk="}]}
    asked = {"job": world.running, "fence": world.fence, "nodes": [0]}
    guessed = {**world.bot.identity, "secret": other.identity["secret"]}
    before = written(world.database)

    _, foreign = callers["bot of another pattern"]
    refused = [
        foreign.post("/v1/sessions", json={"bot": "b1"}),
        foreign.post("/v1/sync", json={**world.bot.identity, "seq": 99}),
        foreign.post("/v1/output", json={**world.bot.identity, **output}),
        foreign.post("/v1/inputs", json={**world.bot.identity, **asked}),
    ]
    assert [answer.status_code for answer in refused] == [403] * 4
    _, same = callers["bot of this name"]
    assert same.post("/v1/sync", json={**guessed, "seq": 99, "leases": [stolen]}).status_code == 409
    assert same.post("/v1/output", json={**guessed, **output}).status_code == 409
    earlier = {**world.bot.identity, **asked, "fence": world.fence - 1}
    for mine in ({**guessed, **asked}, earlier):
        assert same.post("/v1/inputs", json=mine).status_code == 409
    assert same.post("/v1/inputs", json={**world.bot.identity, **asked}).json() == {"results": {}}
    assert other.http.post("/v1/inputs", json={**other.identity, **asked}).status_code == 409
    assert written(world.database) == before

    absent = {**output, "job": ABSENT}
    own = [other.http.post("/v1/output", json={**other.identity, **each}) for each in (output, absent)]
    assert own[0].status_code == own[1].status_code
    assert own[0].text.replace(world.running, ABSENT) == own[1].text
    other.sync(leases=[stolen])
    with world.served.client(world.served.token("operator")) as http:
        job = http.get(f"/v1/jobs/{world.running}").json()
        assert (job["state"], http.get(f"/v1/jobs/{world.running}/output").json()["data"]) == ("leased", "")
