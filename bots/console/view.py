"""One open page of a logged-in person: its frame, calls with the person's token, and parts that are kept up to date.

Whatever comes from the gateway is put on a page as text, never as HTML, and only by `node`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from leasehold.client import Client
from leasehold.errors import LeaseholdError, Unauthorised
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from bots.console.open_pages import make_room
from bots.console.sessions import THEMES, SessionOver, Sessions

T = TypeVar("T")
Record = Mapping[str, Any]

#: The most calls to the gateway at once, of all pages.
THREADS = 16
#: Seconds between two looks of a visible page at what changes fast, and at what changes slowly.
FAST, SLOW = 2.0, 5.0

#: The most characters of what is typed into one field beside a button.
MAX_TYPED = 200
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


def node(tag: str, text: object = "", kind: str = "", **props: Any) -> TextElement:
    """Put an HTML element on the page. kind: its CSS classes. props: its attributes, `for_` for `for`."""
    made = TextElement(tag=tag, text=str(text))
    if kind:
        made.classes(kind)
    for name, value in props.items():
        if value is not None:
            made.props[name.rstrip("_").replace("_", "-")] = value
    return made


@dataclass(frozen=True)
class Link:
    """A page that the bar at the top names, for operators only or for everybody."""

    path: str
    name: str
    of_operators: bool


@dataclass(frozen=True)
class Cell:
    """One cell of a table. link: a path of the console. kind: CSS classes."""

    text: str
    link: str | None = None
    kind: str = ""


class Table:
    """A table whose rows are changed in place, so that a link keeps the focus when figures change."""

    def __init__(self, caption: str, columns: Sequence[str], *, empty: str) -> None:
        self._empty = empty
        self._rows: dict[str, tuple[ui.element, list[tuple[Cell, TextElement]]]] = {}
        with node("div", kind="scroll"):
            with node("table"):
                node("caption", caption)
                with node("thead"), node("tr"):
                    for name in columns:
                        node("th", name, scope="col")
                self._body = node("tbody")
            self._note = node("p", kind="note")

    def show(self, rows: Sequence[tuple[str, Sequence[Cell]]]) -> None:
        """Show these rows in this order, each with a key of its own."""
        self._note.text = "" if rows else self._empty
        wanted = dict(rows)
        for key in [key for key in self._rows if key not in wanted]:
            self._rows.pop(key)[0].delete()
        for place, (key, cells) in enumerate(wanted.items()):
            known = self._rows.get(key)
            if known is None or [each.link for each, _ in known[1]] != [each.link for each in cells]:
                if known is not None:
                    known[0].delete()
                self._rows[key] = known = self._made(cells)
            row, shown = known
            for index, (cell, (before, element)) in enumerate(zip(cells, list(shown), strict=True)):
                if cell != before:
                    element.text = cell.text
                    element.classes(replace=cell.kind)
                    shown[index] = (cell, element)
            children = self._body.default_slot.children
            if place >= len(children) or children[place] is not row:
                row.move(self._body, place)

    def _made(self, cells: Sequence[Cell]) -> tuple[ui.element, list[tuple[Cell, TextElement]]]:
        shown = []
        with self._body, node("tr") as row:
            for cell in cells:
                if cell.link is None:
                    shown.append((cell, node("td", cell.text, cell.kind)))
                else:
                    with node("td"):
                        shown.append((cell, node("a", cell.text, cell.kind, href=cell.link)))
        return row, shown


def field_of(event: Any) -> tuple[Any, Any]:
    """Return the name and the value of the field that a page says was typed into. A page may send anything."""
    sent = event.args if isinstance(event.args, dict) else {}
    return sent.get("field"), sent.get("value")


class Typed:
    """What a person has typed into some fields beside the buttons that use it."""

    def __init__(self, fields: Mapping[str, tuple[str, str]], hints: Mapping[str, str]) -> None:
        """Put the fields on the page. fields: name → label and what stands there at first."""
        self._values = {name: value for name, (_, value) in fields.items()}
        for name, (label, value) in fields.items():
            with node("label", f"{label} "):
                node(
                    "input",
                    type="text",
                    data_field=name,
                    defaultValue=value,
                    placeholder=hints.get(name),
                    autocomplete="off",
                    maxlength=MAX_TYPED,
                )
        ui.on("field", self._type)

    def __getitem__(self, name: str) -> str:
        return self._values[name].strip()

    def _type(self, event: Any) -> None:
        name, value = field_of(event)
        if isinstance(name, str) and name in self._values and isinstance(value, str):
            self._values[name] = value[:MAX_TYPED]


class Facts:
    """A list of names with their values, in the order in which the names first came."""

    def __init__(self) -> None:
        self._list = node("dl")
        self._shown: dict[str, tuple[TextElement, TextElement]] = {}

    def show(self, facts: Mapping[str, tuple[str, str]]) -> None:
        """Show each name with its value and the CSS classes of the value."""
        for name in [name for name in self._shown if name not in facts]:
            for part in self._shown.pop(name):
                part.delete()
        for name, (value, kind) in facts.items():
            if name not in self._shown:
                with self._list:
                    self._shown[name] = (node("dt", name), node("dd"))
            element = self._shown[name][1]
            element.text = value
            element.classes(replace=kind)


class View:
    """The page that a request asks for, of the person whose session it carries. Raises SessionOver."""

    def __init__(self, title: str, links: Sequence[Link]) -> None:
        request = ui.context.client.request
        self.query, state = request.query_params, request.state
        self._sessions: Sessions = state.sessions
        self._session: str = state.session
        make_room(self._session, ui.context.client)
        self.is_operator = self._sessions.find(self._session).is_operator
        self._looks: list[Callable[[], Awaitable[None]]] = []
        self._problems: dict[Callable[[], Awaitable[None]] | None, str] = {}
        self._problem, self.body = self._frame(title, links)

    def __enter__(self) -> "View":
        self.body.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.body.__exit__(*error)

    def _frame(self, title: str, links: Sequence[Link]) -> tuple[TextElement, TextElement]:
        """Put what all pages have on the page; return the places for a problem and for the page's own content."""
        ui.page_title(f"{title} – Leasehold")
        node("a", "Skip to the content", "skip", href="#main")
        shown = [link for link in links if self.is_operator or not link.of_operators]
        keys = _keys(shown)
        with node("nav", kind="top", aria_label="Pages"):
            node("strong", "Leasehold")
            for link in shown:
                current = "page" if link.name == title else None
                node("a", link.name, href=link.path, aria_current=current, data_go=keys[link.name])
            node("span", "operator" if self.is_operator else "submitter", "who")
            self._theme_button()
            node("button", "Keys", type="button", data_shows="keys", title="keys of this page: ?")
            with node("form", method="post", action="/logout"):
                node("button", "Log out", type="submit")
        # The link at the top can give it the focus.
        with node("main", id="main", tabindex="-1"):
            node("h1", title)
            parts = node("div", kind="problem", role="alert"), node("div")
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
