"""One open page of a logged-in person: its frame, calls with the person's token, and parts that are kept up to date."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any, TypeVar

from leasehold.client import Client
from leasehold.errors import LeaseholdError, Unauthorised
from leasehold.wire import load_zone
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from bots.console.open_pages import make_room
from bots.console.parts import node
from bots.console.sessions import THEMES, SessionOver, Sessions

T = TypeVar("T")
Record = Mapping[str, Any]

#: The most calls to the gateway at once, of all pages.
THREADS = 16
#: Seconds between two looks of a visible page at what changes fast, at what changes slowly, and at what costs the pool
#: most of all, such as counts of all its jobs.
FAST, SLOW, RARE = 2.0, 5.0, 30.0

#: What keys do on every page, beside those of the links at the top. static/console.js does it.
KEYS = {
    "?": "this list",
    "/": "to the first field of the page",
    "n": "the next page of a list",
    "f": "the first page of a list",
    "d": "light, dark, or as the system",
    "Tab, Enter": "to the next link or button, and use it",
    "Esc": "close a question, and change nothing",
}

_threads = ThreadPoolExecutor(THREADS, "console")


@dataclass(frozen=True)
class Link:
    """A page that the bar at the top names, for operators only or for everybody."""

    path: str
    name: str
    of_operators: bool


class View:
    """The page that a request asks for, of the person whose session it carries. Raises SessionOver."""

    def __init__(self, title: str, links: Sequence[Link], *, of: str | None = None) -> None:
        """of: the name of the page above it, which the bar at the top marks."""
        request = ui.context.client.request
        self.query, state = request.query_params, request.state
        self._sessions: Sessions = state.sessions
        self._session: str = state.session
        make_room(self._session, ui.context.client)
        self.is_operator = self._sessions.find(self._session).is_operator
        ui.on("zone", self._choose_zone)
        self._looks: list[Callable[[], Awaitable[None]]] = []
        self._problems: dict[Callable[[], Awaitable[None]] | None, str] = {}
        self.heading, self._problem, self.body = self._frame(title, links, of or title)

    def __enter__(self) -> "View":
        self.body.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.body.__exit__(*error)

    def _frame(self, title: str, links: Sequence[Link], current: str) -> tuple[TextElement, TextElement, TextElement]:
        """Put what all pages have on the page; return its heading, and the places for a problem and for its content."""
        ui.page_title(f"{title} – Leasehold")
        node("a", "Skip to the content", "skip", href="#main")
        shown = [link for link in links if self.is_operator or not link.of_operators]
        keys = _keys(shown)
        with node("nav", kind="top", aria_label="Pages"):
            node("strong", "Leasehold")
            node("button", "Menu", "menu", type="button", aria_label="Menu of pages")
            with node("div", kind="links"):
                for link in shown:
                    here = "page" if link.name == current else None
                    node("a", link.name, href=link.path, aria_current=here, data_go=keys[link.name])
            with node("div", kind="self"):
                node("span", "operator" if self.is_operator else "submitter", "who")
                self._theme_button()
                node("button", "Keys", type="button", data_shows="keys", title="keys of this page: ?")
                with node("form", method="post", action="/logout"):
                    node("button", "Log out", type="submit")
        # The link at the top can give it the focus. It stands in the one `main` that the framework makes.
        with node("div", id="main", tabindex="-1"):
            parts = node("h1", title), node("div", kind="problem", role="alert"), node("div", kind="content")
        with node("dialog", kind="keys", id="keys", aria_label="Keys"), node("dl"):
            for key, told in (KEYS | {f"g {keys[link.name]}": f"the page {link.name}" for link in shown}).items():
                node("dt", key)
                node("dd", told)
        return parts

    def _theme_button(self) -> None:
        """Put the button on the page that changes the colours, and keeps them in the session."""
        session = self._sessions.find(self._session)
        button = node("button", f"Theme: {session.theme}", type="button", data_theme="")

        def choose(event: Any) -> None:
            if isinstance(event.args, str) and event.args in THEMES:
                session.theme = event.args
                button.text = f"Theme: {event.args}"

        ui.on("theme", choose)

    @property
    def zone(self) -> tzinfo:
        """The zone of the reader's browser; UTC until it has told it. Raises SessionOver."""
        return self._sessions.find(self._session, use=False).zone

    async def _choose_zone(self, event: Any) -> None:
        """Take the zone of the reader, and show times in it at once. A page may send anything."""
        try:
            chosen = load_zone(str(event.args))
        except ValueError:
            return
        session = self._sessions.find(self._session, use=False)
        if session.zone != chosen:
            session.zone = chosen
            for look in self._looks:
                await look()

    def refuse(self) -> None:
        """Say that the page is not for this person. The gateway would refuse its calls."""
        self._problem.text = "This page is for operators."

    async def ask(self, work: Callable[[Client], T]) -> T:
        """Do `work` with a client that has the person's token, on a thread.

        A session counts as used while a page asks, which a hidden page does not. Raises SessionOver and what `work`
        raises.
        """
        session = self._sessions.find(self._session)
        try:
            return await asyncio.get_running_loop().run_in_executor(_threads, work, session.client)
        except Unauthorised:
            self._sessions.close(self._session)
            raise SessionOver("the token is no longer valid") from None
        except RuntimeError:
            # A log-out closes the client while other calls still use it.
            self._sessions.find(self._session, use=False)
            raise

    async def doing(self, work: Callable[[], Awaitable[None]], *, look: bool = False) -> bool:
        """Do `work`, and say on the page what failed; return whether nothing did.

        look: the page does it by itself. What is said of a look stays until the same look succeeds, and what is said to
        the person until the person has done something else: no look takes an answer away before it is read.
        """
        source = work if look else None
        try:
            await work()
        except SessionOver:
            ui.navigate.to("/login?over=1")
            return False
        except LeaseholdError as error:
            self._problems[source] = "\n".join([str(error), *getattr(error, "__notes__", ())])
            return False
        else:
            self._problems.pop(source, None)
            return True
        finally:
            # Several looks may fail for one reason.
            self._problem.text = "\n".join(dict.fromkeys(self._problems.values()))

    def once(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` once the page is open."""

        async def look() -> None:
            await self.doing(work, look=True)

        ui.timer(0, look, once=True)

    def live(self, refresh: Callable[[], Awaitable[None]], *, seconds: float) -> None:
        """Call `refresh` at once, then every so many seconds while the page is visible, and after each act."""

        async def look() -> None:
            await self.doing(refresh, look=True)

        self._looks.append(look)
        timer = ui.timer(seconds, look)

        async def seen(event: Any) -> None:
            timer.active = event.args != "hidden"
            if timer.active:
                await look()

        ui.on("visibility", seen)

    def confirmed(
        self, name: str, question: Callable[[], Awaitable[str]], act: Callable[[], Awaitable[None]], *, kind: str = ""
    ) -> TextElement:
        """Put a button on the page that asks before it acts.

        question: gives the text to be confirmed. act: is called when the person agrees.
        """

        async def ask() -> None:
            asked.text = await question()
            dialog.props["model-value"] = True

        def close() -> None:
            dialog.props["model-value"] = False

        async def agree() -> None:
            close()
            if await self.doing(act):
                for look in self._looks:
                    await look()

        async def opened() -> None:
            await self.doing(ask)

        button = node("button", name, kind, type="button")
        button.on("click", opened, [])
        with ui.element("q-dialog") as dialog:
            dialog.props["model-value"] = False
            dialog.on("update:modelValue", close, [])
            with node("div", kind="question", role="alertdialog", aria_label=name):
                asked = node("p")
                with node("div", kind="acts"):
                    node("button", "Keep as it is", type="button", autofocus=True).on("click", close, [])
                    node("button", name, f"agree {kind}", type="button").on("click", agree, [])
        return button


def _keys(links: Sequence[Link]) -> dict[str, str]:
    """Return a letter for each link: the first of its name that no link before it has."""
    keys: dict[str, str] = {}
    for link in links:
        keys[link.name] = next(letter for letter in link.name.lower() if letter not in keys.values())
    return keys
