"""One HTTP/1.1 connection: uvicorn's, with bounds on what arrives and strict rules for its framing.

Bytes are counted before the parser receives them, because it joins the pieces of a header in quadratic time. What
intermediaries could read in two ways is refused (RFC 9112, sections 2.2, 3.2, 5.2, 6.1 and 6.3), and every refusal is a
problem document. After a refusal nothing more of the connection is parsed. A connection that becomes a websocket keeps
its place in the table.
"""

import asyncio
import fcntl
import re
import struct
import termios
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from bots.gateway import problems
from bots.gateway.connection_limits import ConnectionTable, Wait
from bots.gateway.long_poll import HangUp

#: A host with an optional port: a name, an IPv4 address, or an IPv6 address in brackets.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[-A-Za-z0-9._~!$&'()*+,;=%]*)(:[0-9]*)?")
_INTEGER = struct.Struct("i")
#: Seconds that an idle client has for the end of its TLS connection when the gateway stops.
_FAREWELL_SECONDS = 1


class _Refusal(Exception):
    """A request breaks a rule. `reason`: for the metrics; the text is for the client."""

    def __init__(self, status: int, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.reason = status, reason


class HttpConnection(HttpToolsProtocol):
    """A connection that keeps to the limits of its ConnectionTable."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        table: ConnectionTable,
        admitted: bool = False,
    ) -> None:
        """Make a connection. admitted: it has its place in the table already."""
        super().__init__(config, server_state, app_state, _loop)
        self._table, self._limits = table, table.limits
        self._wait: Wait | None = None
        self._admitted = admitted
        #: True from the moment on from which `connection_lost` will be called.
        self.was_made = False
        #: True between the end of a header and the end of its body.
        self._in_body = False
        self._header_bytes = self._framing_bytes = 0
        #: Bytes since the last piece of a body: all of them may belong to one trailer.
        self._trailer_bytes = 0
        #: Set once the connection is refused: nothing that arrives is parsed.
        self._refused = False
        self._dropped = 0
        #: The request that the gateway works on; `cycle` is the newest one.
        self._answering: RequestResponseCycle | None = None
        #: A refusal that waits until earlier requests are answered.
        self._last_answer: bytes | None = None
        #: What this connection has become, where the server takes websockets.
        self._websocket: asyncio.Protocol | None = None

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self.was_made = True
        super().connection_made(transport)
        self._hang_up = HangUp(self.flow)
        reason = None if self._admitted else self._table.admit(self._address)
        if reason is None:
            self._admitted = True
            self._enter(Wait.HEADER)
            return
        self._refused = True
        detail = "comes while this gateway has as many connections as it takes"
        if reason == "connections_of_address":
            detail = "comes while this gateway has as many connections from this address as it takes"
        transport.write(self._answer(503, detail))
        transport.close()
        self._enter(Wait.LINGER)

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter(None)
        self._table.read(self)
        if self._admitted:
            self._table.dismiss(self._address)
        if self._websocket is not None:
            self._websocket.connection_lost(exc)
        # uvicorn tells only the newest request that its client is gone.
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._hang_up.happens()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End the connection when its request is answered, at once if it has none. Called when the gateway stops."""
        super().shutdown()
        if self.transport.is_closing() and not self.unsent_memory():
            # By TLS the end waits for the client, and an idle one may not look at its connection for hours.
            self.loop.call_later(_FAREWELL_SECONDS, self.transport.abort)

    def eof_received(self) -> None:
        if self._websocket is not None:
            self._websocket.eof_received()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._websocket is not None:
            self._websocket.pause_writing()
        self._table.unread(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._websocket is not None:
            self._websocket.resume_writing()
        self._table.read(self)

    def expired(self, wait: Wait) -> None:
        self._wait = None
        match wait:
            case Wait.HEADER if self._header_bytes:
                seconds = f"{self._limits.header_seconds:g}"
                self._refuse(
                    _Refusal(408, "header_time", f"has a header that took longer than {seconds} seconds to arrive")
                )
            case Wait.BODY if not self.flow.read_paused:
                seconds = f"{self._limits.body_seconds:g}"
                self._refuse(
                    _Refusal(408, "body_time", f"has a body that took longer than {seconds} seconds to arrive")
                )
            case Wait.BODY:
                self._enter(Wait.BODY)  # the gateway itself has not read it
            case Wait.UNREAD if self._table.is_unread(self):
                self._enter(Wait.UNREAD)  # it is long, and the client takes it
            case Wait.HEADER | Wait.REQUEST if not self.unsent_memory():
                self.transport.close()
                self._enter(Wait.UNREAD)
            case _:
                self.transport.abort()

    def unsent(self) -> int:
        kernel = bytearray(_INTEGER.size)
        try:
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernel)
        except (OSError, ValueError):  # this system cannot tell, or the socket is closed
            return self.unsent_memory()
        return self.unsent_memory() + int(_INTEGER.unpack(kernel)[0])

    def unsent_memory(self) -> int:
        return self.transport.get_write_buffer_size()

    # What arrives

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._drop(len(data))
            return
        if self._websocket is not None:
            self._websocket.data_received(data)
            return
        if self._wait is Wait.REQUEST:
            self._enter(Wait.HEADER)
        try:
            if len(data) <= self._room():
                self._feed(data)
            else:
                self._feed_pieces(memoryview(data))
        except _Refusal as refusal:
            self._refuse(refusal)
        except httptools.HttpParserCallbackError as error:
            self._refuse(self._reason_of(error))
        except httptools.HttpParserError as error:
            self._refuse(_Refusal(400, "malformed", f"is not valid HTTP/1.1: {error}"))
        if not self._refused and self._websocket is None:
            self._enter_next_wait()

    def _room(self) -> int:
        """Return how many bytes may be fed at once: the header must not exceed its limit."""
        return self._limits.header_bytes - (0 if self._in_body else self._header_bytes)

    def _feed_pieces(self, data: memoryview) -> None:
        while data and not self._refused:
            room = self._room()
            if not room:
                raise _Refusal(431, "header_size", f"has a header of more than {self._limits.header_bytes} bytes")
            self._feed(data[:room])
            data = data[room:]

    def _feed(self, piece: bytes | memoryview) -> None:
        if self._in_body:
            self._framing_bytes += len(piece)
            self._trailer_bytes += len(piece)
        else:
            self._header_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            rest = piece[upgrade.args[0] :]
            if self._should_upgrade():
                self._become_websocket(bytes(rest))
            elif rest:  # the parser stops after a request that asks for another protocol; it is answered in this one
                self._feed(rest)
        most = self._limits.framing_bytes
        if self._in_body and (self._framing_bytes > most or self._trailer_bytes > most):
            raise _Refusal(400, "framing", "has chunks that are too small, or extensions or trailers that are too long")

    def _become_websocket(self, first: bytes) -> None:
        """Hand what arrives to a websocket, which writes to the same transport. first: its first bytes."""
        if self.pipeline or (self.cycle is not None and not self.cycle.response_complete):
            raise _malformed("asks for a websocket while an earlier request is not answered")
        self._enter(None)
        self.handle_websocket_upgrade()
        self._websocket = cast(asyncio.Protocol, self.transport.get_protocol())
        self.transport.set_protocol(self)
        if first:
            self._websocket.data_received(first)

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > self._limits.linger_bytes:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["hang_up"] = self._hang_up

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer, which must not become a header after the request was judged
        if len(self.headers) >= self._limits.header_lines:
            raise _Refusal(431, "header_size", f"has more than {self._limits.header_lines} header lines")
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._check_header()
        if len(self.pipeline) >= self._limits.pipelined:
            raise _Refusal(400, "pipelined", f"comes after {self._limits.pipelined} others that are not answered yet")
        self._header_bytes = self._framing_bytes = self._trailer_bytes = 0
        super().on_headers_complete()
        self._in_body = True
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= 2 * len(body)
        self._trailer_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def _check_header(self) -> None:
        hosts, body, coding = [], False, None
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                coding = value.lower()
            elif name == b"content-length":
                body = value != b"0"
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _malformed("is neither HTTP/1.1 nor HTTP/1.0")
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            raise _malformed("needs exactly one Host")
        if hosts and _HOST.fullmatch(hosts[0]) is None:
            raise _malformed("has a Host that is no host with an optional port")
        if coding is not None and (coding != b"chunked" or version == "1.0"):
            raise _malformed("has a Transfer-Encoding other than chunked, or one in HTTP/1.0")
        if self.url[:1] != b"/":
            self._check_target()
        # A parser that sees an upgrade takes the body for the beginning of the other protocol.
        if self.parser.should_upgrade() and (body or coding is not None):
            raise _malformed("asks for an upgrade and has a body")

    def _check_target(self) -> None:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise _malformed("asks for a tunnel, and this is no proxy")
        if self.url == b"*" and method == b"OPTIONS":
            return
        if not self.url.lower().startswith((b"http://", b"https://")) or httptools.parse_url(self.url).path is None:
            raise _malformed("has a target that is neither a path nor an http URL with a path")

    # Answers

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._enter(Wait.UNREAD)
        elif self.pipeline:
            # Reading stays paused, so that no more requests come in than have been answered.
            self._answering, application = self.pipeline.pop()
            self._start_asgi_task(self._answering, application)
        elif self._refused:
            self._finish()
        else:
            self.flow.resume_reading()
            self._enter_next_wait()

    def _enter_next_wait(self) -> None:
        wait: Wait | None
        if self._in_body:
            wait = Wait.BODY
        elif self.cycle is not None and not self.cycle.response_complete:
            wait = None
        else:
            wait = Wait.HEADER if self._header_bytes else Wait.REQUEST
        if wait is not self._wait:
            self._enter(wait)

    def _enter(self, wait: Wait | None) -> None:
        if self._wait is not None:
            self._table.leave(self, self._wait)
        self._wait = wait
        if wait is not None:
            self._table.enter(self, wait)

    # Refusals

    def _reason_of(self, error: httptools.HttpParserCallbackError) -> _Refusal:
        cause = error.__context__
        if isinstance(cause, _Refusal):
            return cause
        if isinstance(cause, httptools.HttpParserInvalidURLError | UnicodeDecodeError):
            return _malformed("has a target that is not valid")
        raise error

    def _refuse(self, refusal: _Refusal) -> None:
        """Answer with a problem document, after earlier requests have been answered, and end the connection."""
        self._refused = True
        self._table.refused(refusal.reason)
        self._last_answer = self._answer(refusal.status, str(refusal))
        if self._in_body and self.pipeline:
            self.pipeline.popleft()  # its body cannot be completed; earlier requests are answered
            self._enter(None)
            return
        if self._in_body:
            if self.cycle.response_started:
                self._last_answer = None
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        elif self.cycle is not None and not self.cycle.response_complete:
            self._enter(None)
            return
        self._finish()

    def _finish(self) -> None:
        """Write the refusal. Then read on for a while: closing at once could destroy it on its way to the client."""
        if self._last_answer is not None:
            self.transport.write(self._last_answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            self.transport.close()
        self._enter(Wait.LINGER)

    def _answer(self, status: int, detail: str) -> bytes:
        headers = {"Connection": "close"} | ({"Retry-After": problems.RETRY_AFTER} if status == 503 else {})
        answer = problems.problem(status, f"request: {detail}", field="request", headers=headers)
        lines = [name + b": " + value for name, value in (*self.server_state.default_headers, *answer.raw_headers)]
        return STATUS_LINE[status] + b"\r\n".join([*lines, b"", bytes(answer.body)])

    @property
    def _address(self) -> str | None:
        return self.client[0] if self.client else None


def _malformed(detail: str) -> _Refusal:
    return _Refusal(400, "malformed", detail)
