"""A gateway with scripted answers on a real port, callers of a real gateway, and the callers' command line."""

import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import click
import httpx
from leasehold.client import Client

from bots.cli.backlog import COMMANDS as BACKLOG
from bots.cli.graphs import graph
from bots.cli.jobs import COMMANDS
from bots.cli.listing import COMMANDS as LISTING
from bots.cli.submit import submit
from schema.moves.grant import Placement, grant
from schema.postgres.engine import Database
from schema.postgres.statements import Statement
from schema.timing import Timing


@dataclass(frozen=True)
class ReceivedRequest:
    """A request that the scripted gateway received."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    token: str | None
    headers: dict[str, str] = field(default_factory=dict)
    #: The body as it came.
    raw: bytes = b""


@dataclass(frozen=True)
class Answer:
    """An answer of the scripted gateway; `cut` closes the connection instead."""

    body: Any = None
    status: int = 200
    cut: bool = False
    headers: dict[str, str] = field(default_factory=dict)


Script = Callable[[ReceivedRequest], Answer]


@dataclass
class Gateway:
    """A scripted gateway: its address, the requests it received, and the function that answers."""

    url: str
    script: Script
    asked: list[ReceivedRequest] = field(default_factory=list)

    def paths(self) -> list[str]:
        return [f"{asked.method} {asked.path}" for asked in self.asked]


def problem(status: int, detail: str, **more: str) -> Answer:
    return Answer({"type": "about:blank", "title": "refused", "status": status, "detail": detail, **more}, status)


def in_turn(*answers: Answer) -> Script:
    """A script that gives these answers in order, and then repeats the last one."""
    left = list(answers)

    def answer(_: ReceivedRequest) -> Answer:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


def accept(asked: ReceivedRequest) -> Answer:
    """Accept every job, with its label as its id."""
    return Answer({"jobs": [{"id": job["label"], "created": True} for job in asked.body["jobs"]]})


def client_for(url: str, *, patience: float = 5.0) -> Client:
    """A client for a gateway that accepts every token."""
    return Client(url, "lh_operator_x_y", chance=random.Random(1), patience=patience)


def _decoded(raw: bytes) -> Any:
    """The body, if it is JSON."""
    try:
        return json.loads(raw)
    except ValueError:
        return None


@contextmanager
def gateway(script: Script, *, unix: str | None = None) -> Iterator[Gateway]:
    """Serve `script` inside the block, on a free port of the loopback interface or on a unix socket."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            parts = urlsplit(self.path)
            asked = ReceivedRequest(
                method=self.command,
                path=parts.path,
                query=dict(parse_qsl(parts.query)),
                body=_decoded(raw),
                token=self.headers.get("Authorization"),
                headers=dict(self.headers),
                raw=raw,
            )
            stands.asked.append(asked)
            answer = stands.script(asked)
            if answer.cut:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = handle_one

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def address_string(self) -> str:
            return "test"

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            # A client may reset its connection long after its own test. The traceback would then be read as the
            # standard error of the test that runs by then.
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)  # type: ignore[arg-type]

    class UnixServer(Server):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)

    server = UnixServer(unix, Handler) if unix else Server(("127.0.0.1", 0), Handler)  # type: ignore[arg-type]
    server.daemon_threads = True
    url = f"http+unix://{unix}" if unix else f"http://127.0.0.1:{server.server_address[1]}"
    stands = Gateway(url=url, script=script)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stands
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# Callers of a real gateway


JOB: dict[str, Any] = {"command": ["true"]}


def submitted(http: httpx.Client, *jobs: dict[str, Any]) -> list[str]:
    answer = http.post("/v1/jobs", json={"jobs": list(jobs)})
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["jobs"]]


def audited(database: Database) -> list[str]:
    return list(database.run(lambda c: c.execute(Statement("SELECT action FROM audit ORDER BY id")).scalars()))


def granted(database: Database, timing: Timing, job: str) -> tuple[int, int]:
    """Grant the job to the only bot. Returns the job's row id and fence."""

    def work(connection: Any) -> tuple[int, int]:
        row = connection.execute(
            Statement("SELECT id FROM jobs WHERE public_id = :id FOR UPDATE"), {"id": job}
        ).scalar_one()
        bot = connection.execute(Statement("SELECT id FROM bots")).scalar_one()
        lease = grant(connection, [Placement(row, bot, {})], assigner="a", strategy="s", ack=timing.ack)
        return row, lease[0].fence

    return database.run(work)


# The callers' command line, run in the test's process


JOB_COMMANDING = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"
OTHER = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0002"
AT = "2026-01-01T00:00:0"


@click.group()
@click.option("--data")
def program(data: str | None) -> None:
    """Root of the callers' commands."""


for _command in (submit, *COMMANDS, *LISTING, *BACKLOG, graph):
    program.add_command(_command)


def call(*arguments: str) -> None:
    program.main(list(arguments), prog_name="leasehold", standalone_mode=False)


def accepting(asked: ReceivedRequest) -> Answer:
    """Accept every job as new, always with the same id."""
    return Answer({"jobs": [{"id": JOB_COMMANDING, "created": True} for _ in asked.body["jobs"]]})


def final(job: str, state: str, **result: Any) -> dict[str, Any]:
    return {"id": job, "state": state, "reason": None, "attempts": 1, "finished_at": f"{AT}9Z", "result": result}
