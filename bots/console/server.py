"""The server of the console: log-in and log-out, who may connect from where, and the headers of every answer.

Log-in and log-out are plain forms, because only an answer to a request can set a cookie. All else happens on a
websocket, which is refused unless its page is of the console and of the same session. Connections are those of the
gateway, with the same limits.
"""

import asyncio
import html
import logging
import secrets
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jinja2
import uvicorn
from fastapi import FastAPI, Request
from leasehold.errors import BadInput, Forbidden, LeaseholdError, NotReady, Unauthorised
from nicegui import client as pages_of_nicegui
from nicegui import core, ui
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.templating import Jinja2Templates

from bots.console import pages
from bots.console.open_pages import OpenPages, page_of
from bots.console.sessions import (
    FAILURES_WITHIN,
    LONGEST,
    Failures,
    SessionOver,
    Sessions,
    TooManySessions,
    admitted,
)
from bots.gateway import listening
from bots.gateway.connection_limits import ConnectionTable, network_of
from bots.gateway.http_server import HttpServer, allow_many_files
from bots.gateway.metrics import GatewayMetrics
from bots.gateway.server import connection_limits
from bots.gateway.settings import GatewaySettings
from schema import clock

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

STATIC = Path(__file__).parent / "static"
COOKIE = "leasehold_console"
#: What anybody may ask for, path by path: the log-in, and files that are the same for everybody.
FILES = frozenset({"/console.css", "/console.js", "/favicon.ico"})
PUBLIC = FILES | {"/login"}
#: Files of NiceGUI, which are the same for everybody who is logged in.
LIBRARY = "/_nicegui/"
#: Where the websocket of the pages is.
SOCKET = "/_nicegui_ws/"
#: The most bytes of a log-in form and of one message on a websocket.
MAX_FORM, MAX_MESSAGE = 4096, 256 * 1024
#: Seconds for which a stop waits for connections.
STOP_WITHIN = 3
#: The hash of the empty style element that NiceGUI puts into each page.
NO_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_log = logging.getLogger("uvicorn.error")
_LOGIN = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Log in – Leasehold</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="stylesheet" href="/console.css">
</head><body><main class="login"><h1>Leasehold</h1>
<div class="problem" role="alert">$problem</div>
<form method="post" action="/login"><label for="token">Token of an operator or a submitter</label>
<input id="token" name="token" type="password" required autocomplete="off" autofocus>
<button type="submit">Log in</button></form></main></body></html>
""")
_NO_PAGE = Template("""<!doctype html>
<html lang="en" data-theme="$theme"><head><meta charset="utf-8"><title>No such page – Leasehold</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="stylesheet" href="/console.css">
<script defer src="/console.js"></script></head><body>
<nav class="top" aria-label="Pages"><strong>Leasehold</strong>
<button class="menu" type="button" aria-label="Menu of pages">Menu</button><div class="links">$links</div>
<div class="self"><form method="post" action="/logout"><button type="submit">Log out</button></form></div></nav>
<main id="main"><h1>There is no such page</h1>
<p>The address may be cut or misspelt. A job, graph or bot has its page below the list of its kind: choose the list
above. On <a href="/jobs">Jobs</a> the search field takes the id of a job, also in short.</p></main></body></html>
""")


def policy(nonce: str) -> str:
    """Return the content security policy: scripts and styles of this server, or marked with this answer's nonce."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'self' 'nonce-{nonce}'",
            f"style-src 'self' 'nonce-{nonce}' {NO_STYLE}",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "form-action 'self'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    )


def _marked(template: str) -> str:
    """Return a template of NiceGUI with the theme, and the nonce on each script and style in it and on nothing else.

    Data are filled in afterwards, so that a script among them never gets the nonce.
    """
    source = (Path(pages_of_nicegui.__file__).parent / "templates" / template).read_text()
    for tag in ("script", "style"):
        source = source.replace(f"<{tag}", f'<{tag} nonce="{{{{ request.state.nonce }}}}"')
    source = source.replace("<html", '<html data-theme="{{ request.state.theme }}"')
    return source.replace('style="display: none"', "hidden")


class Guard:
    """Decides on every request and websocket who may go on, and puts the headers on every answer."""

    def __init__(self, app: Asgi, sessions: Sessions, open_pages: OpenPages, hosts: frozenset[str]) -> None:
        """Guard an application. hosts: the names, in small letters, by which browsers may reach the console."""
        self.app, self._sessions, self._open_pages, self._hosts = app, sessions, open_pages, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        # A header by which a proxy says where it has mounted the page; nobody else may put text into it.
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"x-forwarded-prefix"]
        headers = Headers(scope=scope)
        session = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        state = {"nonce": nonce, "sessions": self._sessions, "session": session, "theme": self._sessions.theme(session)}
        scope.setdefault("state", {}).update(state)

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                given = MutableHeaders(scope=message)
                given.update(HEADERS | {"content-security-policy": policy(nonce)})
                if scope["path"] not in FILES and not scope["path"].startswith(LIBRARY):
                    given["cache-control"] = "no-store"
            await send(message)

        refusal = self._refusal(scope, headers, session)
        if refusal is None:
            await self._go_on(scope, receive, with_headers, session=session or "")
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refusal(scope, receive, with_headers)

    async def _go_on(self, scope: Scope, receive: Receive, send: Send, *, session: str) -> None:
        """Let a request be answered, or a page speak until its session is over.

        A client that breaks the protocol loses its connection, and the log gets one line, without a word of the client.
        """
        is_websocket, has_begun = scope["type"] == "websocket", False

        async def noting(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            with self._open_pages.websocket(session, send) if is_websocket else nullcontext():
                await self.app(scope, receive, noting)
        except Exception as error:
            _log.warning("a %s ended by %s", scope["type"], type(error).__name__)
            if is_websocket:
                await send({"type": "websocket.close", "code": 1011})
            elif not has_begun:
                await PlainTextResponse("the console could not answer", 500)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers, session: str | None) -> Response | None:
        """Return why this may not go on; None if it may."""
        if not self._is_ours(headers.get("host", "")):
            return PlainTextResponse("the console does not know this name of its host; see --allowed-host", 421)
        changes = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
        if changes and not _same_origin(headers):
            return PlainTextResponse("the request comes from another site", 403)
        path = scope["path"]
        if path in PUBLIC:
            return None
        try:
            self._sessions.find(session, use=not path.startswith(SOCKET))
        except SessionOver:
            return RedirectResponse("/login", 303)
        # A websocket only: the other transport would take the events of a page by plain requests.
        if path.startswith(SOCKET) and (scope["type"] != "websocket" or page_of(scope, session) is None):
            return PlainTextResponse("this is no page of the session", 403)
        return None

    def _is_ours(self, host: str) -> bool:
        """True if the host that a browser names is this one. A foreign name may have been pointed here by its owner,
        whose page would then be of the same origin as the console. That cannot be done with an address."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._hosts or bool(ip_address(name))
        except ValueError:  # neither a name of ours nor an address
            return False


def _same_origin(headers: Headers) -> bool:
    """True if a browser says that a page of this server sends the request."""
    origin, host = headers.get("origin"), headers.get("host")
    try:
        return origin is not None and host is not None and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # it is no URL
        return False


def application(sessions: Sessions, *, hosts: frozenset[str]) -> Guard:
    """Make the console's application. NiceGUI has one for each process, so this is called once.

    hosts: the names by which browsers may reach it.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_log_in(app, sessions)
    for name, kind in (("console.css", "text/css"), ("console.js", "text/javascript")):
        app.add_route(f"/{name}", _file(name, kind))
    _prepare_pages()
    ui.run_with(
        app,
        title="Leasehold",
        dark=None,
        language="en-US",
        favicon=STATIC / "icon.svg",
        tailwind=False,
        storage_secret=None,
        show_welcome_message=False,
        reconnect_timeout=10.0,
    )
    open_pages = OpenPages(sessions)
    open_pages.watch()
    return Guard(app, sessions, open_pages, hosts)


def _add_log_in(app: FastAPI, sessions: Sessions) -> None:
    """Add the routes by which people log in and out."""
    failures = Failures(now=clock.monotonic)

    @app.get("/login")
    async def show_login(request: Request) -> Response:
        over = "Your session is over. Log in again." if "over" in request.query_params else ""
        return _login(over, 200)

    @app.post("/login")
    async def log_in(request: Request) -> Response:
        sent = b""
        async for part in request.stream():
            sent += part
            if len(sent) > MAX_FORM:
                return _login("The text is too long to be a token.", 413)
        token = parse_qs(sent.decode("latin-1")).get("token", [""])[0].strip()
        address = network_of(request.client.host if request.client else None) or ""
        if failures.too_many(address):
            return _login(f"Too many log-ins have failed. Try again in {FAILURES_WITHIN:.0f} seconds.", 429)
        failures.add(address)
        try:
            client, is_operator = await asyncio.to_thread(admitted, sessions.url, token)
        except (Unauthorised, BadInput):
            return _login("This is no valid token of the pool.", 401)
        except Forbidden:
            return _login("This is the token of a bot. The console needs that of an operator or a submitter.", 403)
        except (NotReady, LeaseholdError) as error:
            failures.take_back(address)
            return _login(f"The gateway cannot be asked: {error}", 503)
        failures.take_back(address)
        sessions.close(request.state.session)
        try:
            session = sessions.open(client, token, is_operator=is_operator)
        except TooManySessions:
            client.close()
            return _login("Too many people are logged in. Try again later.", 503)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE,
            session.id,
            max_age=int(LONGEST),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    @app.post("/logout")
    async def log_out(request: Request) -> Response:
        sessions.close(request.state.session)
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return answer


def _no_page(request: Request, _error: Exception) -> Response:
    """Answer with the menu of this person, and what to do.

    NiceGUI would make a page, keep it for a minute, and log the URL, which anybody chooses.
    """
    try:
        is_operator = request.state.sessions.find(request.state.session).is_operator
    except SessionOver:
        return RedirectResponse("/login?over=1", 303)
    shown = [link for link in pages.LINKS if is_operator or not link.of_operators]
    links = "".join(f'<a href="{html.escape(link.path)}">{html.escape(link.name)}</a>' for link in shown)
    return HTMLResponse(_NO_PAGE.substitute(theme=html.escape(request.state.theme), links=links), 404)


@cache
def _prepare_pages() -> None:
    """Register the pages, and let their template fit the content security policy."""
    environment = jinja2.Environment(loader=jinja2.FunctionLoader(_marked), autoescape=True)
    pages_of_nicegui.templates = Jinja2Templates(env=environment)
    core.app.config.socket_io_js_transports = ["websocket"]
    core.app.exception_handlers[404] = _no_page
    ui.add_head_html(
        '<link rel="stylesheet" href="/console.css"><script defer src="/console.js"></script>', shared=True
    )
    pages.register()


def _file(name: str, kind: str) -> Callable[[Request], FileResponse]:
    return lambda _: FileResponse(STATIC / name, media_type=kind, headers={"cache-control": "no-cache"})


def _login(problem: str, status: int) -> HTMLResponse:
    return HTMLResponse(_LOGIN.substitute(problem=html.escape(problem)), status)


@dataclass(frozen=True)
class Listen:
    """Where the console listens. port: 0 = any free one. certificate, key: PEM files, for TLS.

    names: further names by which browsers reach it, such as that of a proxy.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    names: tuple[str, ...] = ()

    def bound(self) -> socket.socket:
        """Return a socket that listens there. Raises BadInput that names the option."""
        try:
            return listening.listen(self.host, self.port)
        except OSError as error:
            option = "--host" if isinstance(error, socket.gaierror) else "--port"
            raise BadInput(option, f"cannot listen on {self.host}:{self.port}: {error.strerror}") from None

    @property
    def hosts(self) -> frozenset[str]:
        """The names, in small letters, by which browsers may reach the console; addresses need none."""
        own = ("localhost", self.host, socket.gethostname(), socket.getfqdn())
        return frozenset(name.lower() for name in (*own, *self.names))


def serve(gateway: str, listen: Listen, *, on_ready: Callable[[str], None]) -> int:
    """Serve the console of the pool behind this gateway until a signal; return the exit code of the command.

    on_ready: is told the console's URL once it listens. Raises BadInput.
    """
    sessions = Sessions(gateway, now=clock.monotonic)
    made = listen.bound()
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    address = f"{'http' if listen.certificate is None else 'https'}://{host}:{made.getsockname()[1]}"
    config = uvicorn.Config(
        application(sessions, hosts=listen.hosts),
        log_level="warning",
        access_log=False,
        server_header=False,
        ssl_certfile=listen.certificate,
        ssl_keyfile=listen.key,
        ws_max_size=MAX_MESSAGE,
        timeout_graceful_shutdown=STOP_WITHIN,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise BadInput("--certificate", f"cannot be used with the key: {error}") from None
    # The limits of a gateway without settings. The table counts for its metrics, which the console shows nobody.
    table = ConnectionTable(connection_limits(GatewaySettings(), files=allow_many_files()), GatewayMetrics())
    server = HttpServer(config, table, on_listening=lambda _: on_ready(address))
    try:
        server.run(sockets=[made])
    finally:
        made.close()
        sessions.close_all()
    return 130 if server.stopped_by is signal.SIGINT else 0
