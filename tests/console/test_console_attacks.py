"""What a stranger, or somebody with a submitter's token, can make of the console by requests that no page sends."""

import ctypes
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from click.testing import CliRunner

from bots.console import command, server
from bots.console.open_pages import MAX_PAGES
from bots.console.sessions import (
    FAILURES_WITHIN,
    MAX_FAILURES,
    MAX_SESSIONS,
    MAX_SESSIONS_OF_TOKEN,
    Failures,
    SessionOver,
    Sessions,
    TooManySessions,
)
from tests.support.patience import MINUTE
from tests.support.screens.console import Clock, Console, unasked

pytest.importorskip("nicegui", reason="the console needs the extra leasehold[console]")
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect


class Page:
    """A page without a browser: what its websocket sends and hears."""

    def __init__(self, http: httpx.Client, path: str = "/") -> None:
        self.http, html = http, http.get(path).text
        self.id = _found(r"client_id['\"]: ?['\"]([0-9a-f-]{36})", html)
        self.theme_listener = _found(r'"listener_id":"([0-9a-f-]{36})","type":"theme"', html)

    @contextmanager
    def speaking(self) -> Iterator[Any]:
        """A websocket of this page, after its handshake."""
        query = f"EIO=4&transport=websocket&client_id={self.id}&next_message_id=0&implicit_handshake=true"
        query += "&document_id=6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0009&tab_id=6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0008"
        host = str(self.http.base_url).removeprefix("http").rstrip("/")
        cookies = "; ".join(f"{name}={value}" for name, value in self.http.cookies.items())
        with connect(
            f"ws{host}/_nicegui_ws/socket.io/?{query}",
            origin=self.http.headers["origin"],
            additional_headers={"Cookie": cookies},
            open_timeout=MINUTE,
        ) as socket:
            assert socket.recv(MINUTE).startswith("0")
            socket.send("40")
            while not socket.recv(MINUTE).startswith("40"):
                pass
            yield socket

    def theme(self) -> str:
        return _found(r'<html data-theme="(\w+)"', self.http.get("/").text)


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


def say(socket: Any, name: str, **message: object) -> None:
    socket.send("42" + json.dumps([name, message]))


def settled(socket: Any) -> None:
    """Wait until the console has read what was sent before: its answer to a request comes after it."""
    socket.send('421["handshake",{}]')
    deadline = time.monotonic() + MINUTE
    while not socket.recv(deadline - time.monotonic()).startswith("431"):
        pass


def test_a_page_speaks_for_itself_and_not_for_the_page_of_somebody_else(shown: Console) -> None:
    with shown.client(shown.operator) as operator, shown.client(shown.theirs) as submitter:
        foreign, own = Page(operator), Page(submitter)
        with foreign.speaking(), own.speaking() as socket:
            for page in (foreign, own):
                say(socket, "event", id=0, client_id=page.id, listener_id=page.theme_listener, args=['"dark"'])
            settled(socket)
            assert (foreign.theme(), own.theme()) == ("system", "dark")


def test_messages_that_no_page_sends_change_nothing_and_end_nothing(shown: Console) -> None:
    with shown.client(shown.theirs) as http:
        page = Page(http)
        with page.speaking() as socket:
            wrong: list[dict[str, Any]] = [
                {"id": 0, "listener_id": "nobody", "args": []},
                {"id": {}, "listener_id": page.theme_listener, "args": ['"dark"']},
                {"id": 0, "listener_id": page.theme_listener, "args": ["{"]},
                {"id": 0, "listener_id": page.theme_listener, "args": [3]},
                {"id": 0, "listener_id": page.theme_listener, "args": ['{"a": []}']},
                {},
            ]
            for message in wrong:
                say(socket, "event", client_id=page.id, **message)
                say(socket, "ack", client_id=page.id, next_message_id="x")
                say(socket, "javascript_response", client_id=page.id)
            for whole in ('42["event"]', '42["event",[],{}]', '42["event",null]'):
                socket.send(whole)
            say(socket, "event", id=0, client_id=page.id, listener_id=page.theme_listener, args=['"light"'])
            settled(socket)
            assert page.theme() == "light"
        for broken in ("42[]", "45", "x", "4", "42{", '451-["event"]', "9" * 200):
            with page.speaking() as socket:
                socket.send(broken)
    assert "Traceback" not in shown.log.read_text()


def test_nobody_writes_text_of_their_own_into_the_log(shown: Console) -> None:
    text = "written-by-a-stranger"
    with shown.client() as nobody:
        for path in (f"/login{text}", f"/login/{text}", f"/_nicegui/{text}", f"/console.css{text}", f"/{text}"):
            answer = nobody.get(path)
            assert (answer.status_code, answer.headers.get("location")) == (303, "/login"), path
    with shown.client(shown.theirs) as http:
        for path in (f"/{text}", f"/_nicegui/{text}", f"/jobs/1/{text}"):
            answer = http.get(path)
            assert (answer.status_code, answer.text) == (404, "there is no such page"), path
        page = Page(http)
        with page.speaking() as socket:
            say(socket, "log", client_id=page.id, level="error", message=text)
            settled(socket)
    assert text not in shown.log.read_text()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "[abc]"},
        {"Host": "[::1"},
        {"Origin": "http://[hello world]"},
        {"Origin": "//[", "X-Forwarded-For": "a:b:c"},
        {"X-Forwarded-For": "a:b:c"},
    ],
    ids=str,
)
def test_headers_that_are_no_names_are_refused_and_not_told_in_the_log(shown: Console, headers: dict[str, str]) -> None:
    with shown.client() as nobody:
        before = len(shown.log.read_text())
        for answer in (
            nobody.get("/login", headers=headers),
            nobody.post("/login", headers=headers, data={"token": "x"}),
        ):
            assert answer.status_code < 500, answer.text
        assert "Traceback" not in shown.log.read_text()[before:]


def test_a_log_in_that_is_cut_off_leaves_no_traceback(shown: Console) -> None:
    host, port = urlsplit(shown.url).hostname, urlsplit(shown.url).port
    head = f"POST /login HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: {shown.url}\r\nContent-Length: 100\r\n"
    with socket.create_connection((host, port), timeout=MINUTE) as connection:
        connection.sendall(f"{head}Content-Type: application/x-www-form-urlencoded\r\n\r\ntoken=".encode())
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    with shown.client() as nobody:
        assert nobody.get("/login").status_code == 200
    assert "Traceback" not in shown.log.read_text()


def test_a_websocket_ends_with_the_log_out(shown: Console) -> None:
    with shown.client(shown.theirs) as http:
        page = Page(http)
        with page.speaking() as socket:
            assert http.post("/logout").status_code == 303
            heard: list[str] = []
            with pytest.raises(ConnectionClosedError, match="1008"):
                heard.extend(socket)
    assert any("/login?over=1" in text for text in heard)


def test_the_pages_of_a_session_are_bounded(shown: Console) -> None:
    with shown.client(shown.theirs) as http:
        first = Page(http)
        for _ in range(MAX_PAGES):
            assert http.get("/").status_code == 200
        with pytest.raises(Exception, match="403"), first.speaking():
            pass
        with Page(http).speaking():
            pass


def test_the_console_answers_only_to_names_that_nobody_else_can_point_at_it(shown: Console) -> None:
    port = urlsplit(shown.url).port
    hosts = {f"127.0.0.1:{port}": 200, f"[::1]:{port}": 200, "LOCALHOST": 200, socket.gethostname(): 200}
    hosts |= {"evil.example": 421, f"evil.example:{port}": 421, "127.0.0.1.evil.example": 421, "127.0.0.1@evil": 400}
    with shown.client() as http:
        assert {host: http.get("/login", headers={"Host": host}).status_code for host in hosts} == hosts


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: x\r\na: ", b"GET /", b"POST /login HTTP/1.1\r\nx"])
def test_one_endless_header_is_refused_after_some_bytes(shown: Console, sent: bytes) -> None:
    host, port = urlsplit(shown.url).hostname, urlsplit(shown.url).port
    with socket.create_connection((host, port), timeout=MINUTE) as connection:
        with pytest.raises(OSError):
            connection.sendall(sent + b"x" * 100_000_000)
    with shown.client() as http:
        assert http.get("/login").status_code == 200


def test_the_connections_of_the_console_are_counted_and_have_deadlines(shown: Console) -> None:
    host, port = urlsplit(shown.url).hostname, urlsplit(shown.url).port
    with socket.create_connection((host, port), timeout=MINUTE) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_many_log_ins_with_one_token_end_no_session_of_another() -> None:
    now = Clock()
    sessions = Sessions("http://127.0.0.1:9", now=now)
    victim = sessions.open(unasked(), "victim", is_operator=True).id
    for _ in range(MAX_SESSIONS_OF_TOKEN + 5):
        now.at += 1
        sessions.open(unasked(), "attacker", is_operator=False)
    assert sessions.find(victim).is_operator
    assert len(sessions) == MAX_SESSIONS_OF_TOKEN + 1
    for number in range(MAX_SESSIONS - len(sessions)):
        sessions.open(unasked(), f"other {number}", is_operator=False)
    with pytest.raises(TooManySessions):
        sessions.open(unasked(), "late", is_operator=False)
    second = sessions.open(unasked(), "victim", is_operator=True).id
    assert sessions.find(second).is_operator
    with pytest.raises(SessionOver):
        sessions.find(victim)
    sessions.close_all()


def test_an_address_whose_log_ins_fail_has_to_wait() -> None:
    now = Clock()
    failures = Failures(now=now)
    for _ in range(MAX_FAILURES):
        assert not failures.too_many("a")
        failures.add("a")
    assert failures.too_many("a")
    assert not failures.too_many("b")
    failures.take_back("a")
    assert not failures.too_many("a")
    failures.add("a")
    now.at += FAILURES_WITHIN
    assert not failures.too_many("a")


def test_the_console_hides_its_memory_which_holds_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    get_dumpable, set_dumpable = 3, 4
    libc = ctypes.CDLL(None)
    found = []

    def serve(*_: object, **__: object) -> int:
        found.append(libc.prctl(get_dumpable, 0, 0, 0, 0))
        return 0

    monkeypatch.setattr(server, "serve", serve)
    before = libc.prctl(get_dumpable, 0, 0, 0, 0)
    try:
        CliRunner().invoke(command.console, ["--url", "http://127.0.0.1:9"], catch_exceptions=False)
    finally:
        libc.prctl(set_dumpable, before, 0, 0, 0)
    assert found == [0]
