"""What the console answers without a browser: log-in, cookies, headers, expiry, and what strangers send."""

import ctypes
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import httpx
import pytest
from click.testing import CliRunner
from leasehold.errors import BadInput, LeaseholdError
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

import bots.console
from assigner.cli import errors
from assigner.cli.main import cli
from bots.console import command
from bots.console.jobs import searched
from bots.console.sessions import (
    FAILURES_WITHIN,
    IDLE,
    LONGEST,
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

#: Headers by which a browser opens a websocket.
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


def address(shown: Console) -> tuple[str, int]:
    parts = urlsplit(shown.url)
    return parts.hostname or "", parts.port or 0


@pytest.fixture(scope="module", autouse=True)
def slow(shown: Console) -> Iterator[socket.socket]:
    """A connection that has sent half a request before the first test. The last one sees what became of it."""
    with socket.create_connection(address(shown), timeout=MINUTE) as opened:
        opened.sendall(b"GET / HTTP/1.1\r\n")
        yield opened


def test_nobody_sees_a_page_without_logging_in(shown: Console) -> None:
    with shown.client() as http:
        for path in ("/", "/jobs", "/jobs/6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0009", "/nowhere"):
            answer = http.get(path)
            assert (answer.status_code, answer.headers["location"]) == (303, "/login"), path


def test_a_wrong_token_opens_no_session(shown: Console) -> None:
    bot = shown.served.token("bot", bot="b1")
    wrong = {"": 401, "garbage": 401, shown.operator[:-1]: 401, "\x00": 401, bot: 403, "x" * 5000: 413}
    with shown.client() as http:
        answers = {token: http.post("/login", data={"token": token}) for token in wrong}
        assert {token: answer.status_code for token, answer in answers.items()} == wrong
        assert not http.cookies
        assert all(token not in answer.text for token, answer in answers.items() if token)


def test_the_cookie_says_nothing_of_the_token_and_no_script_can_read_it(shown: Console) -> None:
    with shown.client() as http:
        answer = http.post("/login", data={"token": shown.operator})
        cookie = answer.headers["set-cookie"]
        again = http.post("/login", data={"token": shown.operator}).headers["set-cookie"]
        page = http.get("/")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/" in cookie
    assert shown.operator not in cookie + page.text
    assert cookie.partition(";")[0] != again.partition(";")[0]


def test_a_log_out_ends_the_session_and_not_only_the_cookie(shown: Console) -> None:
    with shown.client(shown.operator) as http:
        session = dict(http.cookies)
        assert http.get("/").status_code == 200
        assert http.post("/logout").headers["location"] == "/login"
        assert not http.cookies
    with shown.client() as http:
        http.cookies.update(session)
        assert http.get("/").status_code == 303


def test_other_sites_can_neither_log_in_nor_log_out_nor_act(shown: Console) -> None:
    with shown.client(shown.operator) as http:
        client_id = page_id(http)
        for origin in ("http://evil.example", "null", shown.url.replace("127.0.0.1", "localhost"), None):
            http.headers.pop("origin", None)
            if origin is not None:
                http.headers["origin"] = origin
            assert http.post("/login", data={"token": shown.theirs}).status_code == 403
            assert http.post("/logout").status_code == 403
            assert websocket(http, client_id) == 403
        assert http.get("/").status_code == 200


def test_a_websocket_needs_a_page_of_its_own_session(shown: Console) -> None:
    with shown.client(shown.operator) as ours, shown.client(shown.theirs) as theirs, shown.client() as nobody:
        client_id = page_id(ours)
        assert websocket(theirs, client_id) == 403
        assert websocket(nobody, client_id) == 403
        assert websocket(ours, "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0009") == 403
        # The transport without a websocket is closed altogether.
        path = f"/_nicegui_ws/socket.io/?EIO=4&transport=polling&client_id={client_id}"
        assert (ours.get(path).status_code, ours.post(path, content="40").status_code) == (403, 403)
        assert websocket(ours, client_id) == 101


def page_id(http: httpx.Client) -> str:
    """Ask for a page; return the id by which its websocket names it."""
    return _found(r"client_id['\"]: ?['\"]([0-9a-f-]{36})", http.get("/").text)


def websocket(http: httpx.Client, client_id: str) -> int:
    """Ask for a websocket of a page; return the status of the answer."""
    path = f"/_nicegui_ws/socket.io/?EIO=4&transport=websocket&client_id={client_id}"
    with http.stream("GET", path, headers=UPGRADE) as answer:
        return answer.status_code


def test_every_answer_keeps_the_page_to_itself(shown: Console) -> None:
    with shown.client(shown.operator) as http:
        answers = [http.get(path) for path in ("/", "/login", "/jobs", "/console.js", "/nowhere")]
        answers += [http.post("/login", headers={"Origin": "http://evil.example"})]
    for answer in answers:
        rules = dict(rule.partition(" ")[::2] for rule in answer.headers["content-security-policy"].split("; "))
        assert rules["frame-ancestors"] == rules["default-src"] == rules["base-uri"] == "'none'"
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert {rules["connect-src"], rules["font-src"], rules["form-action"]} == {"'self'"}
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"
    nonces = [answer.headers["content-security-policy"].partition("'nonce-")[2][:22] for answer in answers]
    assert len(set(nonces)) == len(nonces)
    assert [answer.headers["cache-control"] for answer in answers[:3]] == ["no-store"] * 3


def test_a_session_ends_when_nobody_uses_it_and_after_half_a_day_at_the_latest() -> None:
    now = Clock()
    sessions = Sessions("http://127.0.0.1:9", now=now)
    idle, used = (sessions.open(unasked(), "token", is_operator=True).id for _ in range(2))
    while now.at < LONGEST - IDLE:
        now.at += IDLE - 1
        assert sessions.find(used).is_operator
    with pytest.raises(SessionOver):
        sessions.find(idle)
    now.at = LONGEST
    with pytest.raises(SessionOver):
        sessions.find(used)
    assert len(sessions) == 0
    for unknown in ("", None, "x", "\udcff"):
        with pytest.raises(SessionOver):
            sessions.find(unknown)


def test_the_command_refuses_what_would_give_tokens_away() -> None:
    for arguments, field in (
        (["--host", "0.0.0.0"], "--host"),
        (["--certificate", "/nowhere.pem"], "--key"),
        (["--certificate", "/nowhere.pem", "--key", "/nowhere.pem"], "--certificate"),
        (["--url", "http://far.example"], "--url"),
    ):
        answer = CliRunner().invoke(command.console, ["--url", "http://127.0.0.1:9", *arguments], obj=None)
        assert isinstance(answer.exception, BadInput)
        assert answer.exception.field == field


def test_the_data_directory_before_the_name_of_the_command_is_used_also_if_the_environment_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LEASEHOLD_URL", raising=False)
    monkeypatch.setenv("LEASEHOLD_DATA", str(tmp_path))
    (tmp_path / "gateway.url").write_text("http://127.0.0.1:9")
    assert errors.run(cli, ["--data", str(tmp_path / "other"), "console", "--port", "0"]) == 2
    assert f"no gateway is known in {tmp_path / 'other'}" in capsys.readouterr().err


def test_without_the_extra_the_command_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    answer = CliRunner().invoke(command.console, ["--url", "http://127.0.0.1:9"])
    assert isinstance(answer.exception, LeaseholdError)
    assert str(answer.exception) == "the console needs NiceGUI: pip install 'leasehold[console]'"


# What no page sends


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
            assert answer.status_code == 404, path
            assert "There is no such page" in answer.text, path
            assert '<a href="/jobs"' in answer.text, path
            assert text not in answer.text, path
            assert '<a href="/bots"' not in answer.text, "which a submitter may not read"
        page = Page(http)
        with page.speaking() as socket:
            say(socket, "log", client_id=page.id, level="error", message=text)
            settled(socket)
    assert text not in shown.log.read_text()


def test_headers_that_are_no_names_are_refused_and_not_told_in_the_log(shown: Console) -> None:
    with shown.client() as nobody:
        for headers in (
            {"Host": "[abc]"},
            {"Host": "[::1"},
            {"Origin": "http://[hello world]"},
            {"Origin": "//[", "X-Forwarded-For": "a:b:c"},
            {"X-Forwarded-For": "a:b:c"},
        ):
            assert nobody.get("/login", headers=headers).status_code < 500, headers
            assert nobody.post("/login", headers=headers, data={"token": "x"}).status_code < 500, headers
    assert "Traceback" not in shown.log.read_text()


def test_a_log_in_that_is_cut_off_leaves_no_traceback(shown: Console) -> None:
    head = (
        f"POST /login HTTP/1.1\r\nHost: {urlsplit(shown.url).netloc}\r\nOrigin: {shown.url}\r\nContent-Length: 100\r\n"
    )
    with socket.create_connection(address(shown), timeout=MINUTE) as connection:
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
        for _ in range(40):  # `MAX_PAGES`, whose module loads the framework
            assert http.get("/limits").status_code == 200  # which says that it is for operators, and is made at once
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


def test_one_endless_header_is_refused_after_some_bytes(shown: Console) -> None:
    for sent in (b"GET / HTTP/1.1\r\nHost: x\r\na: ", b"GET /", b"POST /login HTTP/1.1\r\nx"):
        with socket.create_connection(address(shown), timeout=MINUTE) as connection, pytest.raises(OSError):
            connection.sendall(sent + b"x" * 100_000_000)
    with shown.client() as http:
        assert http.get("/login").status_code == 200


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

    # The real one would load the framework into this process.
    stands_in = SimpleNamespace(serve=serve, Listen=dict)
    monkeypatch.setitem(sys.modules, "bots.console.server", stands_in)
    monkeypatch.setattr(bots.console, "server", stands_in, raising=False)
    before = libc.prctl(get_dumpable, 0, 0, 0, 0)
    try:
        CliRunner().invoke(command.console, ["--url", "http://127.0.0.1:9"], catch_exceptions=False)
    finally:
        libc.prctl(set_dumpable, before, 0, 0, 0)
    assert found == [0]


def test_the_connections_of_the_console_have_deadlines(slow: socket.socket) -> None:
    assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_search_says_what_it_does_not_understand_and_drops_no_word() -> None:
    tokyo = ZoneInfo("Asia/Tokyo")
    assert searched.written("label:'my label' state:failed state:dead meta:a=1", tokyo) == {
        "label": "my label", "state": ["failed", "dead"], "metadata": ["a=1"]
    }  # fmt: skip
    for search, said in (
        ("my label", "search: has two for label, 'my' and 'label': one with a space is written label:'my label'"),
        ("instance:a instance:b", "search: has two for instance, 'a' and 'b'"),
        ("label:'x", "search: a quotation mark is not closed"),
        ("ended_after:lately", "ended_after: 'lately' is not a time, such as 10:00, "),
    ):
        with pytest.raises(BadInput, match=f"^{said}"):
            searched.written(search, tokyo)
    assert searched.written("ended_after:'2026-12-01 10:00' queued_before:2026-12-01T10:00Z", tokyo) == {
        "ended_after": "2026-12-01T10:00:00+09:00", "queued_before": "2026-12-01T10:00:00+00:00"
    }  # fmt: skip
    with pytest.raises(BadInput, match="is skipped by a change of the clock"):
        searched.written("ended_after:'2026-03-29 02:30'", ZoneInfo("Europe/Berlin"))
    yesterday = searched.written("ended_after:'yesterday 10:00'", tokyo)["ended_after"]
    assert yesterday.endswith("T10:00:00+09:00")
