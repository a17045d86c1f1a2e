"""The HTTP transport: addresses of gateways, connections, repeated requests, and problem documents turned into errors.

It uses the standard library's HTTP client: to import another one takes longer than the whole work of most commands.
One module because a request that is repeated, refused or broken off by another thread is one connection's affair.
"""

import base64
import json
import os
import random
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Self
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit

from leasehold import wire
from leasehold.errors import (
    MAX_TOLD,
    BadInput,
    Conflict,
    Forbidden,
    LeaseholdError,
    NoAnswer,
    NotFound,
    NotReady,
    QueueFull,
    Unauthorised,
)

Record = dict[str, Any]

#: Seconds for which requests to a gateway that never answered are repeated.
FIRST_CONTACT = 3.0
#: Where a gateway says whether it can serve, and seconds within which it does.
READY, READY_WITHIN = "/readyz", 3.0
#: The most characters of a refusal that are shown: a cycle of a graph may be long.
MAX_DETAIL = 2000

_AGAIN = frozenset({429, 502, 503, 504})
#: Signs of a path that are not escaped: those of the syntax, and what is escaped already.
_LEFT_ALONE = "/%:@!$&'()*+,;="
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Transport:
    """Sends requests and repeats them; several threads may share a transport. Arguments: see `Client`."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        chance: random.Random,
        timeout: float,
        patience: float,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not token or not token.isascii() or not token.isprintable():
            raise Unauthorised("the given token is empty or has characters that no token has")
        self.url = url
        self._chance, self._timeout, self._patience, self._sleep = chance, timeout, patience, sleep
        self._reached = False
        self._connections = Connections(address(url), timeout=timeout)
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    def close(self) -> None:
        """Close all connections. Requests that are under way fail, and so do later ones, with RuntimeError."""
        self._connections.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Record | bytes | None = None,
        held: float = 0.0,
    ) -> Record:
        """Send a request and repeat it while its outcome is unknown.

        body: a document of JSON, or such a document as it is sent.
        held: seconds for which the gateway may hold the request, in addition to the timeout.
        """
        target = quote(path, safe=_LEFT_ALONE) + (f"?{urlencode(query, doseq=True)}" if query else "")
        headers, sent = self._headers, None
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
            sent = body if isinstance(body, bytes) else wire.written(body).encode()
        begun, tries, may_be_done = time.monotonic(), 0, False
        interruption = interruption_of_thread()
        while True:
            tries += 1
            try:
                answer = self._once(method, target, headers, sent, timeout=self._timeout + held)
                break
            except _Unknown as unknown:
                if interruption is not None:
                    interruption.check()
                may_be_done = may_be_done or unknown.may_be_done
                patience = self._patience if self._reached else min(self._patience, FIRST_CONTACT)
                if time.monotonic() - begun >= patience:
                    if unknown.answer is not None:
                        if _is_no_gateways(unknown.answer):
                            raise NoGateway(self.url, unknown.answer, is_behind=self._reached) from None
                        raise _refusal(unknown.answer) from None
                    if isinstance(unknown.__cause__, Unreachable):
                        raise NoAnswer(f"cannot reach the gateway at {self.url}: is it running?") from None
                    raise self._silence() from None
            self.rest(self._chance.uniform(0.0, min(2.0, 0.05 * 2.0 ** min(tries, 30))))
        if method == "DELETE" and answer.status == HTTPStatus.NOT_FOUND and may_be_done:
            # An earlier try has removed it, and its answer was lost.
            return {}
        if not 200 <= answer.status < 300:
            raise _refusal(answer)
        if answer.status == HTTPStatus.NO_CONTENT:
            return {}
        return _document(answer, self.url)

    def _silence(self) -> LeaseholdError:
        """Return what a gateway says of itself that took a connection and did not answer a request in time.

        It may try for longer than a request is waited for, such as to reach its database. Agents, which have no
        patience and a deadline, do not ask.
        """
        if self._patience > 0.0:
            with suppress(OSError, HTTPException):
                asked = self._connections.request("GET", READY, headers=self._headers, body=None, timeout=READY_WITHIN)
                if asked.status in _AGAIN:
                    return _refusal(asked)
        reason = "takes connections and does not answer: look at its log and its database"
        return NoAnswer(f"the gateway at {self.url} {reason}")

    def rest(self, seconds: float) -> None:
        """Sleep between two requests. Raises Interrupted."""
        interruption = interruption_of_thread()
        if interruption is None:
            self._sleep(seconds)
        else:
            interruption.rest(seconds)

    def _once(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None, *, timeout: float
    ) -> "Answer":
        try:
            answer = self._connections.request(method, target, headers=headers, body=body, timeout=timeout)
        except Unreachable as error:
            if isinstance(error.__cause__, ssl.SSLCertVerificationError):
                reason = error.__cause__.verify_message
                if error.__cause__.verify_code in _OF_UNKNOWN_AUTHORITY:
                    reason += "; SSL_CERT_FILE names a file with the certificate of its authority"
                raise LeaseholdError(f"the certificate of the gateway at {self.url} is refused: {reason}") from None
            raise _Unknown(None) from error
        except (OSError, HTTPException) as error:
            # A connection was accepted, so the address is right and the gateway has an outage.
            self._reached = True
            raise _Unknown(None) from error
        if _is_no_gateways(answer):
            raise _Unknown(answer)
        self._reached = True
        if answer.status in _AGAIN:
            raise _Unknown(answer)
        return answer


# Connections


class Unreachable(OSError):
    """No connection to the gateway could be made."""


@dataclass(frozen=True)
class Address:
    """Where a gateway listens. path: comes before the path of every request. socket: path of a unix socket."""

    scheme: str
    host: str
    port: int | None
    path: str = ""
    socket: str | None = None


@dataclass(frozen=True)
class Answer:
    """The status, the reason phrase and the body of an answer. retry_after: seconds that it asks to wait."""

    status: int
    reason: str
    body: bytes
    retry_after: float | None = None

    def json(self) -> Any:
        """Return the document in the body; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class _WholeRequests(HTTPConnection):
    """A connection that sends each request in one piece.

    Each send lets other threads of this process run. A body that is sent by itself would come after they have run.
    """

    _pieces: list[bytes] | None = None

    def request(self, *arguments: Any, **named: Any) -> None:
        self._pieces = []
        try:
            super().request(*arguments, **named)
            whole = b"".join(self._pieces)
        finally:
            self._pieces = None
        self.send(whole)

    def send(self, data: Any) -> None:
        if self._pieces is None:
            super().send(data)
        else:
            self._pieces.append(data)


class _SecureConnection(_WholeRequests, HTTPSConnection):
    """A connection by TLS."""


class _UnixConnection(_WholeRequests):
    """A connection to a unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(self.timeout)
            connected.connect(self._path)
        except BaseException:
            connected.close()
            raise
        self.sock = connected


class Connections:
    """Connections to one gateway, kept open for further requests; several threads may use them at once.

    Other machines are reached through the proxy that the environment names, and by TLS they are checked against
    the certificates in SSL_CERT_FILE or SSL_CERT_DIR, else those of the package certifi. timeout: seconds to connect.
    """

    def __init__(self, address: Address, *, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._proxy = _proxy(address)
        self._trusted = _trusted() if address.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[HTTPConnection] = []
        self._busy: set[HTTPConnection] = set()
        self._closed = False
        self._process = os.getpid()

    def close(self) -> None:
        """Close all connections, also those that wait for an answer."""
        with self._lock:
            self._closed = True
            for connection in self._busy:
                if connection.sock is not None:
                    # Closing it would not wake the thread that reads from it.
                    shut_down(connection.sock)
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes | None, timeout: float
    ) -> Answer:
        """Send one request. timeout: the longest silence, in seconds.

        Raises Unreachable if there was no connection, another OSError or HTTPException if there was no answer, and
        RuntimeError after `close`.
        """
        connection = self._take()
        reusable = False
        interruption = interruption_of_thread()
        try:
            with nullcontext() if interruption is None else interruption.of(connection):
                if connection.sock is None:
                    self._connect(connection)
                if interruption is not None:
                    interruption.check()
                connection.sock.settimeout(timeout)
                target = self._address.path + target
                if self._proxy is not None and self._address.scheme == "http":
                    target = f"http://{_authority(self._address)}{target}"
                    headers = {**headers, **self._proxy.headers, "Host": _authority(self._address)}
                # A proxy that refuses a large body may answer and close before it has read it.
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, target, body=body, headers=dict(headers))
                response = connection.getresponse()
                retry_after = _seconds(response.getheader("Retry-After"))
                answer = Answer(response.status, response.reason, response.read(), retry_after)
            reusable = not response.will_close
            return answer
        finally:
            self._give_back(connection, reusable=reusable)

    def _take(self) -> HTTPConnection:
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")
            if self._process != os.getpid():
                # A server that forks its workers shares these sockets with them: two would read each other's answers.
                self._process = os.getpid()
                self._idle.clear()
                self._busy.clear()
            while self._idle:
                connection = self._idle.pop()
                if not _ended(connection.sock):
                    break
                connection.close()
            else:
                connection = self._made()
            self._busy.add(connection)
            return connection

    def _give_back(self, connection: HTTPConnection, *, reusable: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if reusable and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, connection: HTTPConnection) -> None:
        connection.timeout = self._timeout
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:
            raise Unreachable(str(error)) from error
        with self._lock:
            if self._closed:
                raise RuntimeError("the transport is closed")

    def _made(self) -> HTTPConnection:
        address, proxy = self._address, self._proxy
        if address.socket is not None:
            return _UnixConnection(address.socket)
        host, port = (address.host, address.port) if proxy is None else (proxy.host, proxy.port)
        if self._trusted is None:
            return _WholeRequests(host, port)
        connection = _SecureConnection(host, port, context=self._trusted)
        if proxy is not None:
            connection.set_tunnel(address.host, address.port or 443, headers=dict(proxy.headers))
        return connection


@dataclass(frozen=True)
class _Proxy:
    host: str
    port: int
    headers: Mapping[str, str]


def _proxy(address: Address) -> _Proxy | None:
    """Return the proxy that the environment names for this address. Raises BadInput if it speaks another protocol."""
    if address.socket is not None or address.host in _LOOPBACK:
        return None
    from urllib.request import getproxies, proxy_bypass

    known: Mapping[str, str] = getproxies()
    name = address.scheme if known.get(address.scheme) else "all"
    url = known.get(name)
    if not url or proxy_bypass(_authority(address)):
        return None
    parts = split(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise BadInput(f"{name}_proxy", "names no proxy of the form http://HOST:PORT")
    headers = {}
    if parts.username is not None:
        named = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(named.encode()).decode()
    return _Proxy(parts.hostname, parts.port or 80, headers)


#: How OpenSSL says that nobody whom we trust has signed a certificate. Other refusals need another certificate.
_OF_UNKNOWN_AUTHORITY = frozenset({2, 18, 19, 20, 21})


def _trusted() -> ssl.SSLContext:
    """Return the certificates to trust. To read them takes longer than most commands, and only TLS needs them."""
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return ssl.create_default_context()
    import certifi

    return ssl.create_default_context(cafile=certifi.where())


def _authority(address: Address) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return host if address.port is None else f"{host}:{address.port}"


def _ended(connected: socket.socket) -> bool:
    """True if the peer of an idle connection has closed it."""
    watch = select.poll()
    watch.register(connected, select.POLLIN)
    return bool(watch.poll(0))


class TooLarge(BadInput):
    """The gateway, or a proxy before it, refused a request because of its size."""


class _Unknown(Exception):
    """The request may or may not have been executed. `answer`: a proxy's or gateway's refusal, if there is one."""

    def __init__(self, answer: Answer | None) -> None:
        super().__init__()
        self.answer = answer

    @property
    def may_be_done(self) -> bool:
        """Tell whether the gateway may have executed the request."""
        if self.answer is None:
            return not isinstance(self.__cause__, Unreachable)
        return self.answer.status == HTTPStatus.GATEWAY_TIMEOUT


def split(url: str) -> SplitResult:
    """Split a gateway's URL into its parts. Raises BadInput if it is not a URL."""
    try:
        parts = urlsplit(url)
        if not url.isprintable() or " " in url or (parts.port or 1) < 1:
            raise ValueError("white space, or no port")
        (parts.hostname or "").encode("idna")
        return parts
    except (ValueError, UnicodeError):
        raise BadInput("url", f"'{wire.escaped(url)}' is not a URL") from None


def is_local(url: str) -> bool:
    """Return True if a token sent to this URL stays on this machine."""
    parts = split(url)
    return parts.scheme == "http+unix" or parts.hostname in _LOOPBACK


def address(url: str) -> Address:
    """Return where the gateway with this URL listens. Raises BadInput."""
    parts = split(url)
    if parts.scheme == "http+unix":
        path = unquote(parts.netloc + parts.path)
        if not path.startswith("/"):
            raise BadInput("url", f"'{wire.escaped(url)}' does not name a socket by its absolute path")
        return Address("http", "localhost", None, socket=path)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise BadInput("url", f"'{wire.escaped(url)}' is not http://HOST:PORT, https://HOST or http+unix:///SOCKET")
    return Address(parts.scheme, parts.hostname, parts.port, path=quote(parts.path.rstrip("/"), safe=_LEFT_ALONE))


def _seconds(header: str | None) -> float | None:
    """Return the seconds in a header; None if there are none. A date, which HTTP allows too, counts as none."""
    return float(header) if header is not None and header.isascii() and header.isdigit() else None


def _document(answer: Answer, url: str) -> Record:
    document = answer.json()
    if not isinstance(document, dict):
        raise LeaseholdError(f"what answers at {url} is not a Leasehold gateway")
    return document


def _is_no_gateways(answer: Answer) -> bool:
    """Return whether a proxy refuses a request, as while it is set up anew, and no gateway: those give a reason."""
    if not 400 <= answer.status < 500 or answer.status in (*_AGAIN, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):
        return False
    problem = answer.json()
    return not (isinstance(problem, dict) and (problem.get("detail") or problem.get("title")))


class NoGateway(LeaseholdError):
    """No gateway has answered a request, but something before it, or at a wrong address."""

    def __init__(self, url: str, answer: Answer, *, is_behind: bool) -> None:
        """is_behind: a gateway has answered there before."""
        said = wire.printable(f"{answer.status} {answer.reason}", 100)
        super().__init__(
            f"something before the gateway at {url} refuses this request: it says {said}"
            if is_behind
            else f"what answers at {url} is not a Leasehold gateway: it says {said}"
        )


def _refusal(answer: Answer) -> LeaseholdError:
    """Turn a problem document into the error that it describes."""
    problem = answer.json()
    if not isinstance(problem, dict):
        problem = {}
    told = str(problem.get("detail") or problem.get("title") or answer.reason)
    detail = wire.printable(told, MAX_DETAIL)
    match answer.status:
        case 413 if "field" not in problem:
            return TooLarge("request", "is larger than a proxy before the gateway accepts")
        case 413:
            return TooLarge("request", detail.removeprefix(f"{problem['field']}: "))
        case 400 | 415 | 422:
            errors = problem.get("errors")
            others = [_refused(each) for each in errors[1:MAX_TOLD]] if isinstance(errors, list) else []
            first = _refused(problem | {"detail": detail})
            more = problem.get("more")
            return BadInput(first.field, first.reason, others=others, more=more if isinstance(more, int) else 0)
        case 401:
            return Unauthorised(detail)
        case 403:
            return Forbidden(detail)
        case 404:
            return NotFound(detail)
        case 409 if problem.get("code") == QueueFull.CODE:
            return QueueFull(detail)
        case 409:
            return Conflict(str(problem.get("code") or "conflict"), detail)
        case 503:
            return NotReady(detail, retry_after=answer.retry_after)
        case status:
            return LeaseholdError(f"the gateway answered {status}: {detail}")


def _refused(said: Any) -> BadInput:
    """The refusal of one field, of a problem document or of one of its `errors`."""
    said = said if isinstance(said, dict) else {}
    field = wire.escaped(str(said.get("field") or "request"), 200)
    return BadInput(field, wire.printable(str(said.get("detail")), MAX_DETAIL).removeprefix(f"{field}: "))


# Breaking off the requests of another thread


class Interruption:
    """Lets another thread break off what this one does: the requests and the pauses inside `with interruption:`.

    Whether a request that is broken off was executed is unknown.
    """

    def __init__(self) -> None:
        self._lock, self._wanted = threading.Lock(), threading.Event()
        self._connection: HTTPConnection | None = None
        self._before: Token[Interruption | None] | None = None

    def __enter__(self) -> Self:
        self._before = _INTERRUPTION.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _INTERRUPTION.reset(self._before)

    def interrupt(self) -> None:
        """Break off the request that is under way; later ones raise Interrupted."""
        with self._lock:
            self._wanted.set()
            if self._connection is not None and self._connection.sock is not None:
                shut_down(self._connection.sock)

    def check(self) -> None:
        """Raise Interrupted if another thread has asked for it."""
        if self._wanted.is_set():
            raise Interrupted

    def rest(self, seconds: float) -> None:
        """Sleep. Raises Interrupted."""
        if self._wanted.wait(seconds):
            raise Interrupted

    @contextmanager
    def of(self, connection: HTTPConnection) -> Iterator[None]:
        """Let `interrupt` end the use of this connection. Raises Interrupted."""
        with self._lock:
            self.check()
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


class Interrupted(Exception):
    """Another thread has broken off the call."""


_INTERRUPTION: ContextVar[Interruption | None] = ContextVar("leasehold_interruption", default=None)


def interruption_of_thread() -> Interruption | None:
    """Return what can break off the calls of the current thread."""
    return _INTERRUPTION.get()


def shut_down(connected: socket.socket) -> None:
    """Wake the thread that reads from a socket; the socket is at its end then."""
    with suppress(OSError):  # it has ended already
        # A TLS socket's own method would let another thread, which reads from it, fail with a ValueError.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
