"""What strangers may send to a gateway, and how slowly: raw sockets against its bounds and its framing rules."""

import asyncio
import json
import logging
import random
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from leasehold.client import Client
from leasehold.errors import BadInput, LeaseholdError

from bots.gateway.connection_limits import ConnectionLimits, ConnectionTable, Wait
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.server import SHUTDOWN_SECONDS, GatewaySettings, connection_limits
from schema.postgres.engine import Database
from schema.timing import Timing
from tests.support.patience import MINUTE, eventually
from tests.support.servers import Served, serving

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSING = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
#: Numbers so small that a test reaches them; the times are those of production.
LIMITS = ConnectionLimits(connections=400, per_address=400, linger_seconds=0.3, pipelined=20)
#: Times so short that a test waits for them.
SHORT = replace(LIMITS, header_seconds=1.0, body_seconds=1.0, idle_seconds=1.0, unread_seconds=0.4)


@dataclass(frozen=True)
class Answer:
    """One answer, as it came over the socket."""

    status: int
    media_type: str
    body: bytes


def answers(raw: bytes) -> list[Answer]:
    """Split what came over a socket into whole answers; fail if anything else came."""
    found = []
    while raw:
        head, separator, rest = raw.partition(b"\r\n\r\n")
        assert separator, raw
        status, *lines = head.split(b"\r\n")
        match = re.fullmatch(rb"HTTP/1\.1 (\d{3}) [A-Za-z ]+", status)
        assert match, raw[:200]
        headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
        if match[1] != b"100":
            size = int(headers[b"content-length"])
            assert len(rest) >= size, raw[:200]
            found.append(Answer(int(match[1]), headers[b"content-type"].decode(), rest[:size]))
            rest = rest[size:]
        raw = rest
    return found


def connect(served: Served) -> socket.socket:
    parts = urlsplit(served.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=MINUTE)


def until_closed(connection: socket.socket) -> bytes:
    """Read until the gateway closes the connection."""
    read = bytearray()
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            read += piece
    return bytes(read)


def ask(served: Served, *pieces: bytes) -> list[Answer]:
    """Send these pieces on one connection and return all answers until the gateway closes it."""
    with connect(served) as connection:
        with suppress(ConnectionResetError, BrokenPipeError):
            for piece in pieces:
                connection.sendall(piece)
        return answers(until_closed(connection))


def statuses(served: Served, *pieces: bytes) -> list[int]:
    return [answer.status for answer in ask(served, *pieces)]


def refused(served: Served, reason: str) -> float:
    return float(served.app.state.metrics.connections_refused.labels(reason)._value.get())


@pytest.fixture
def gateway(
    database: Database, timing: Timing, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """A gateway which must neither log a warning nor keep a connection. Its limits are LIMITS, or the parameter."""
    with serving(database, timing, limits=getattr(request, "param", LIMITS)) as served:
        yield served
        eventually(lambda: not served.server.server_state.connections, what="all connections have ended")
        eventually(lambda: not served.server.server_state.tasks, what="all requests have ended")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


#: Each of these is refused; two programs could read most of them differently.
MALFORMED = {
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    "a host with a path": b"GET /healthz HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "HTTP/2.0": b"GET /healthz HTTP/2.0\r\nHost: x\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "an unknown method": b"LIST /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "a tunnel": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a star": b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    "another scheme": b"GET ftp://x/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "no path": b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
    "a port that is none": b"GET http://x:99999999/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    "length and chunks": CHUNKED + b"Content-Length: 2\r\n\r\n{}",
    "chunks and length": POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": POST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": POST + b"Content-Length: +2\r\n\r\n{}",
    "a length before a space": POST + b"Content-Length : 2\r\n\r\n{}",
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding before chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding after chunked": CHUNKED + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n0\r\n\r\n",
    "a folded line": b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "a folded first line": b"GET /healthz HTTP/1.1\r\n Host: x\r\n\r\n",
    "a bare LF": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "a bare CR": b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: b\rContent-Length: 9\r\n\r\n",
    "a NUL": b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    "a name with a space": b"GET /healthz HTTP/1.1\r\nHost: x\r\nA B: c\r\n\r\n",
    "a chunk size that is none": CHUNKED + b"\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "a chunk that is too long": CHUNKED + b"\r\n1\r\n{}\r\n0\r\n\r\n",
    "chunks with bare LF": CHUNKED + b"\r\n2\n{}\n0\n\n",
    "an upgrade with a body": POST + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 2\r\n\r\n{}",
}


def test_what_two_programs_could_read_differently_is_refused_and_nothing_after_it_is_read(gateway: Served) -> None:
    for name, raw in MALFORMED.items():
        found = ask(gateway, raw, GET)
        # A request without a token may be answered before its body turns out to be broken.
        assert [answer.status for answer in found] in ([400], [401]), name
        problem = json.loads(found[0].body)
        assert (found[0].media_type, problem["status"]) == ("application/problem+json", found[0].status), name
        if found[0].status == 400:
            assert problem["detail"].startswith("request: "), name


def test_valid_requests_are_answered_in_their_order_however_they_are_cut(gateway: Served) -> None:
    upgrade = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    absolute = b"GET http://other/healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    unknown = b"\r\nGET /v1/nothing HTTP/1.1\r\nHost: [::1]:80\r\n\r\n"
    stranger = CHUNKED + b"\r\n2;ext=1\r\n{}\r\n0\r\nX-Sum: 1\r\n\r\n"
    last = b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    whole = b"".join([GET, upgrade, absolute, unknown, stranger, GET, last])
    wanted = [200, 200, 200, 404, 401, 200, 200]
    assert statuses(gateway, whole) == wanted
    assert statuses(gateway, *(whole[n : n + 1] for n in range(len(whole)))) == wanted


def test_a_refusal_waits_for_the_answers_to_earlier_requests(gateway: Served) -> None:
    ready = GET.replace(b"healthz", b"readyz")
    assert statuses(gateway, ready + MALFORMED["two hosts"] + GET) == [200, 400]
    assert statuses(gateway, ready + MALFORMED["a chunk size that is none"]) == [200, 400]
    assert statuses(gateway, ready + GET * 100) == [200] * (LIMITS.pipelined + 1) + [400]
    assert refused(gateway, "pipelined") == 1


def test_a_trailer_is_no_header_of_its_request_or_of_the_next_one(gateway: Served) -> None:
    token = gateway.token("operator").encode()
    trailed = b"\r\n2\r\n{}\r\n0\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
    status = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n" + trailed
    strange = status + chunked + status + b"\r\n" + CHUNKED + trailed + CLOSING
    assert statuses(gateway, strange) == [401, 401, 401, 200]
    assert statuses(gateway, status + b"Authorization: Bearer " + token + b"\r\n" + chunked + CLOSING) == [200, 200]


def test_sizes_are_counted_before_they_are_parsed(gateway: Served) -> None:
    begun = CLOSING[:-2] + b"A: "
    longest = begun + b"a" * (LIMITS.header_bytes - len(begun) - 4) + b"\r\n\r\n"
    assert statuses(gateway, longest) == [200]
    assert statuses(gateway, longest[:9999], longest[9999:]) == [200]
    assert statuses(gateway, begun + b"a" + longest[len(begun) :]) == [431]
    assert statuses(gateway, GET, b"\r\n" * LIMITS.header_bytes) == [200, 431]
    lines = b"a: b\r\n" * (LIMITS.header_lines - 2)
    assert statuses(gateway, CLOSING[:-2] + lines + b"\r\n") == [200]
    assert statuses(gateway, CLOSING[:-2] + lines + b"a: b\r\n\r\n") == [431]
    assert refused(gateway, "header_size") == 3
    with connect(gateway) as flood:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            flood.sendall(begun + b"a" * 100_000_000)
    for much in (b"2;" + b"x" * 300_000 + b"\r\n{}\r\n0\r\n\r\n", b"0\r\nA: " + b"x" * 300_000, b"1\r\n{\r\n" * 60_000):
        assert statuses(gateway, CHUNKED + b"\r\n" + much) in ([400], [401], [])
    # A long body does not allow a long trailer, whose pieces the parser joins in quadratic time.
    trailer = b"%x\r\n" % 300_000 + b"x" * 300_000 + b"\r\n0\r\nA: " + b"x" * 200_000 + b"\r\n\r\n" + CLOSING
    assert statuses(gateway, CHUNKED + b"\r\n" + trailer) in ([401], [])
    assert refused(gateway, "framing") == 4


@pytest.mark.parametrize("gateway", [SHORT], indirect=True)
def test_who_sends_too_slowly_is_told_so_or_cut_off(gateway: Served) -> None:
    token = gateway.token("operator").encode()
    body = POST + b"Authorization: Bearer " + token + b"\r\nContent-Length: 9\r\n\r\n{"
    sent = (b"", GET[:-1], GET, POST + b"Content-Length: 9\r\n\r\n{", body)
    connections = [connect(gateway) for _ in sent]
    for connection, raw in zip(connections, sent, strict=True):
        connection.sendall(raw)
    silent, slow, idle, denied, allowed = connections
    assert answers(until_closed(silent)) == []
    assert [answer.status for answer in answers(until_closed(slow))] == [408]
    assert [answer.status for answer in answers(until_closed(idle))] == [200]
    assert [answer.status for answer in answers(until_closed(denied))] == [401]
    assert [answer.status for answer in answers(until_closed(allowed))] == [408]
    for connection in connections:
        connection.close()
    assert (refused(gateway, "header_time"), refused(gateway, "body_time")) == (1, 2)


@pytest.mark.parametrize("gateway", [SHORT], indirect=True)
def test_answers_that_nobody_reads_are_dropped(gateway: Served) -> None:
    parts = urlsplit(gateway.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((parts.hostname, parts.port))
        connection.sendall(GET.replace(b"healthz", b"openapi.json") * 15)
        eventually(lambda: refused(gateway, "unread") == 1)
        assert until_closed(connection).count(b"HTTP/1.1 200") < 15


def test_connections_beyond_the_limits_get_503_and_places_are_given_back(database: Database, timing: Timing) -> None:
    limits = ConnectionLimits(connections=3, per_address=2, idle_seconds=MINUTE)
    with serving(database, timing, limits=limits) as served:
        first, second = connect(served), connect(served)
        for connection in (first, second):
            connection.sendall(GET)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        found = ask(served)
        assert [answer.status for answer in found] == [503]
        assert "from this address" in json.loads(found[0].body)["detail"]
        assert refused(served, "connections_of_address") == 1
        first.close()
        eventually(lambda: served.app.state.metrics.connections._value.get() == 1)
        with connect(served) as third:
            third.sendall(GET)
            assert third.recv(65536).startswith(b"HTTP/1.1 200")
        second.close()


@pytest.fixture
def certified(tmp_path: Path) -> GatewaySettings:
    """Settings of a gateway that speaks TLS, with a certificate of its own."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl is not installed")
    settings = GatewaySettings(port=0, tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    made = ["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt"]
    made += ["ec_paramgen_curve:prime256v1", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", str(settings.tls_key), "-out", str(settings.tls_cert)]
    subprocess.run([openssl, *made, *files], check=True, capture_output=True)
    return settings


def test_a_client_that_does_not_know_the_authority_of_a_certificate_is_told_where_to_name_it(
    database: Database,
    timing: Timing,
    certified: GatewaySettings,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(host: str) -> str:
        url = f"https://{host}:{urlsplit(served.url).port}"
        with Client(url, "lh_operator_0_0", chance=chance) as client, pytest.raises(LeaseholdError) as refused:
            client.status()
        return str(refused.value)

    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    with serving(database, timing, settings=certified) as served:
        assert "self-signed certificate; SSL_CERT_FILE names a file with the certificate" in told("localhost")
        monkeypatch.setenv("SSL_CERT_FILE", str(certified.tls_cert))
        assert "certificate" not in told("localhost")
        assert told("127.0.0.1").endswith("certificate is not valid for '127.0.0.1'.")


def test_who_does_not_finish_a_tls_handshake_takes_a_place_and_who_idles_does_not_delay_the_stop(
    database: Database, timing: Timing, certified: GatewaySettings, caplog: pytest.LogCaptureFixture
) -> None:
    limits = ConnectionLimits(connections=3, per_address=3)
    context = ssl.create_default_context(cafile=certified.tls_cert)
    context.check_hostname = False
    with serving(database, timing, limits=limits, settings=certified) as served:
        taken = served.app.state.metrics.connections._value
        silent, garbled = connect(served), connect(served)
        secure = context.wrap_socket(connect(served))
        secure.sendall(GET)
        assert secure.recv(65536).startswith(b"HTTP/1.1 200")
        assert taken.get() == 3
        assert until_closed(connect(served)) == b""
        assert refused(served, "connections_of_address") + refused(served, "connections") == 1
        garbled.sendall(GET)
        until_closed(garbled)
        silent.close()
        eventually(lambda: taken.get() == 1)
        assert refused(served, "handshake") == 2
        begun = time.monotonic()
    assert time.monotonic() - begun < SHUTDOWN_SECONDS
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    for connection in (garbled, secure):
        connection.close()


def test_a_request_that_the_stop_interrupts_is_answered_with_a_problem_document(
    database: Database, timing: Timing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(database, timing) as served:
        monkeypatch.setattr(served.app.state.probe, "trouble", asyncio.Event().wait)
        served.server.config.timeout_graceful_shutdown = 0
        connection = connect(served)
        connection.sendall(GET.replace(b"healthz", b"readyz"))
        eventually(lambda: len(served.server.server_state.tasks) == 1)
    with connection:
        [answer] = answers(until_closed(connection))
    assert (answer.status, answer.media_type) == (503, "application/problem+json")
    assert json.loads(answer.body)["code"] == "outcome_unknown"


def test_more_connections_than_files_are_refused_at_the_start() -> None:
    with pytest.raises(BadInput, match=r"gateway\.max_connections: .* open files"):
        connection_limits(GatewaySettings(max_connections=1_000_000), files=4096)
    assert connection_limits(GatewaySettings(), files=4096).connections == 3840
    assert connection_limits(GatewaySettings(), files=4096).per_address == 1920
    assert connection_limits(GatewaySettings(), files=10**6).connections == 32_768


@dataclass(eq=False)
class FakeConnection:
    """A connection whose client has taken some of an answer."""

    left: int = 10_000_000
    ended: Wait | None = None

    def expired(self, wait: Wait) -> None:
        self.ended = wait

    def unsent(self) -> int:
        return self.left

    def unsent_memory(self) -> int:
        return self.left


def test_a_slow_reader_that_goes_on_reading_keeps_its_connection() -> None:
    now = [0.0]
    table = ConnectionTable(ConnectionLimits(unread_bytes=25_000_000), GatewayMetrics(), now=lambda: now[0])
    reads, stands = FakeConnection(), FakeConnection()
    table.unread(reads)
    table.unread(stands)
    for _ in range(10):
        now[0] += 31
        reads.left -= 40_000
        table.sweep()
    assert (reads.ended, stands.ended) == (None, Wait.UNREAD)
    others = [FakeConnection(), FakeConnection()]
    for other in others:
        table.unread(other)
    assert (reads.ended, others[0].ended, others[1].ended) == (Wait.UNREAD, None, None)


def test_addresses_of_one_network_are_counted_together() -> None:
    table = ConnectionTable(ConnectionLimits(connections=10, per_address=1), GatewayMetrics())
    assert table.admit("2001:db8::1") is None
    assert table.admit("2001:db8::ffff:2") == "connections_of_address"
    assert table.admit("2001:db8:0:1::1") is None
    assert table.admit("::ffff:192.0.2.1") is None
    assert table.admit("192.0.2.1") == "connections_of_address"
    assert [table.admit(None) for _ in range(8)] == [None] * 7 + ["connections"]
    table.dismiss("2001:db8::1")
    assert table.admit("2001:db8::3") is None


# Chance: requests that are damaged, cut and sent together in any way


#: What is damaged: what is valid and what is not, with and without a body.
SEEDS = [
    GET,
    GET * 3,
    POST + b"Content-Length: 2\r\n\r\n{}",
    CHUNKED + b"\r\n2;a=b\r\n{}\r\n3\r\nabc\r\n0\r\nX: y\r\n\r\n" + GET,
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n",
    *MALFORMED.values(),
]
BITS = [
    *(
        b"\r",
        b"\n",
        b"\r\n",
        b"\0",
        b" ",
        b":",
        b"\xff",
        b"0",
        b"chunked",
        b"9" * 20,
        b"A" * 5000,
        b"a: b\r\n" * 50,
        GET,
    )
]


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """Change a few places of a request."""
    for _ in range(chance.randrange(4)):
        at, size = chance.randrange(len(raw) + 1), chance.choice((0, 0, 1, 5, 40))
        raw = raw[:at] + chance.choice([*BITS, raw[at : at + 60], bytes([chance.randrange(256)])]) + raw[at + size :]
    return raw


async def send(host: str, port: int, raw: bytes, chance: random.Random) -> tuple[bytes, bool]:
    """Send in pieces, perhaps only a part, perhaps hang up; return what came, and whether it is all that came."""
    reader, writer = await asyncio.open_connection(host, port)
    read = bytearray()
    try:
        while raw and not writer.is_closing():
            size = chance.choice((1, 7, 100, len(raw)))
            writer.write(raw[:size])
            await writer.drain()
            raw = raw[size:]
            if chance.random() < 0.02:
                writer.transport.abort()
                return b"", False
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        async with asyncio.timeout(MINUTE):
            while piece := await reader.read(65536):
                read += piece
    except (ConnectionResetError, BrokenPipeError):
        return bytes(read), False
    finally:
        writer.close()
    return bytes(read), True


async def fuzz(served: Served, chance: random.Random, rounds: int) -> list[tuple[bytes, bytes, bool]]:
    parts = urlsplit(served.url)
    assert parts.hostname is not None
    assert parts.port is not None
    sent = [damaged(chance.choice(SEEDS), chance) + damaged(chance.choice(SEEDS), chance) for _ in range(rounds)]
    seeded = ((raw, random.Random(chance.getrandbits(32))) for raw in sent)
    done = await asyncio.gather(*(send(parts.hostname, parts.port, raw, own) for raw, own in seeded))
    return [(raw, read, whole) for raw, (read, whole) in zip(sent, done, strict=True)]


@pytest.mark.parametrize("gateway", [SHORT], indirect=True)
def test_whatever_is_sent_the_gateway_goes_on_serving_others(gateway: Served, chance: random.Random) -> None:
    with gateway.client() as other:
        for _ in range(2):
            for raw, read, whole in asyncio.run(fuzz(gateway, chance, 100)):
                if not whole:
                    continue
                for answer in answers(read):
                    assert answer.status < 500, raw
                    if answer.status >= 400:
                        assert answer.media_type == "application/problem+json", raw
                        assert json.loads(answer.body)["status"] == answer.status, raw
            assert other.get("/healthz").status_code == 200
