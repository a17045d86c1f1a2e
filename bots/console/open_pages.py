"""The open pages of each session: which websocket speaks for which page, how many there are, and their end.

NiceGUI takes the id of a page from each message. A page's id is no secret among those who share a screen, so here a
websocket speaks for the page and the session with which it was opened, and for no other, while the session lasts.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from nicegui import Client as Page
from nicegui import core
from nicegui.background_tasks import create

from bots.console.sessions import SessionOver, Sessions

#: The most pages of one session. One more ends the oldest page that no browser shows, else the oldest.
MAX_PAGES = 40
#: Seconds after the end of a session at which its pages are sent to the log-in, and as many until their websockets end.
FAREWELL_SECONDS = 1.0
#: What NiceGUI lets a browser send, but for `log`, which would write any text into our log.
MESSAGES = ("handshake", "event", "javascript_response", "ack")

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Handler = Callable[..., Any]


def page_of(scope: Scope, session: str | None) -> Page | None:
    """Return the page that a websocket was opened for, if it was given to this session."""
    named = parse_qs(scope["query_string"].decode("latin-1")).get("client_id", [""])[0]
    page = Page.instances.get(named)
    return page if page is not None and page.request.state.session == session else None


def make_room(session: str, new: Page) -> None:
    """End pages of a session that has as many as it may have, so that a new one, which is being made, has room."""
    mine = [page for page in Page.instances.values() if page is not new and page.request.state.session == session]
    mine.sort(key=lambda page: (page.has_socket_connection, page.created))
    for page in mine[: max(0, len(mine) + 1 - MAX_PAGES)]:
        page.delete()


class OpenPages:
    """Watches the websockets of all pages. NiceGUI has one server of websockets for each process, so there is one."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        #: How to send on each open websocket, and its session.
        self._websockets: dict[Send, str] = {}
        sessions.on_close = self._end

    @contextlib.contextmanager
    def websocket(self, session: str, send: Send) -> Iterator[None]:
        """Inside the block a websocket is open, which ends with its session."""
        self._websockets[send] = session
        try:
            yield
        finally:
            del self._websockets[send]

    def watch(self) -> None:
        """Let no message of a browser reach NiceGUI unless its websocket may send it."""
        known: dict[str, Handler] = core.sio.handlers["/"]
        known.pop("log", None)
        core.sio.on("connect", _sound(known["connect"]))
        for name in MESSAGES:
            core.sio.on(name, self._guarded(known[name]))
        # They log with a traceback what a browser may send at will.
        for logger in (core.sio.logger, core.sio.eio.logger):
            logger.setLevel(logging.CRITICAL)

    def _end(self, session: str) -> None:
        """Send the pages of a session that is over to the log-in, and then end their websockets.

        Not at once: the page on which somebody has logged out is on its way there already.
        """
        loop = asyncio.get_running_loop()
        loop.call_later(FAREWELL_SECONDS, self._send_away, session)
        loop.call_later(2 * FAREWELL_SECONDS, self._close, session)

    def _send_away(self, session: str) -> None:
        for page in list(Page.instances.values()):
            if page.request.state.session == session and page.has_socket_connection:
                page.open("/login?over=1")

    def _close(self, session: str) -> None:
        for send, of in self._websockets.items():
            if of == session:
                create(send({"type": "websocket.close", "code": 1008}), name="end of a session")

    def _guarded(self, inner: Handler) -> Handler:
        sound = _sound(inner)

        async def take(socket: str, message: Any = None, *_: Any) -> Any:
            return await sound(socket, message) if self._may_speak(socket, message) else False

        return take

    def _may_speak(self, socket: str, message: Any) -> bool:
        scope = core.sio.get_environ(socket)["asgi.scope"]
        session = scope["state"]["session"]
        try:
            self._sessions.find(session, use=False)
        except SessionOver:
            return False
        page = page_of(scope, session)
        return page is not None and isinstance(message, dict) and message.get("client_id") == page.id


def _sound(inner: Handler) -> Callable[..., Awaitable[Any]]:
    """Let a handler of NiceGUI answer False to what no page sends: missing parts, and values of other types.

    Errors in what a message causes do not come here: NiceGUI catches and logs them.
    """

    async def take(*given: Any) -> Any:
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            result = inner(*given)
            return await result if isinstance(result, Awaitable) else result
        return False

    return take
