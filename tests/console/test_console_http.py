"""What the console answers without a browser: log-in, cookies, headers, other sites, expiry of sessions."""

import re
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from leasehold.errors import BadInput, LeaseholdError

from assigner.cli import errors
from assigner.cli.main import cli
from bots.console import command
from bots.console.sessions import IDLE, LONGEST, SessionOver, Sessions
from tests.support.screens.console import Clock, Console, unasked

#: Headers by which a browser opens a websocket.
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


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
    found = re.search(r"client_id['\"]: ?['\"]([0-9a-f-]{36})", http.get("/").text)
    assert found is not None
    return found[1]


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


def test_nothing_is_loaded_from_elsewhere(shown: Console) -> None:
    with shown.client(shown.operator) as http:
        for page in (http.get("/").text, http.get("/login").text, http.get("/console.css").text):
            assert "https://" not in page
            assert "//cdn" not in page


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


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--host", "0.0.0.0"], "--host"),
        (["--certificate", "/nowhere.pem"], "--key"),
        (["--certificate", "/nowhere.pem", "--key", "/nowhere.pem"], "--certificate"),
        (["--url", "http://far.example"], "--url"),
    ],
)
def test_the_command_refuses_what_would_give_tokens_away(arguments: list[str], field: str) -> None:
    given = ["--url", "http://127.0.0.1:9", *arguments]
    answer = CliRunner().invoke(command.console, given, obj=None)
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
