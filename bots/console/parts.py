"""The parts of pages: elements, cells, tables, lists of facts, and fields beside buttons.

Whatever comes from the gateway is put on a page as text, and only by `node`. The one text that is sent as HTML is that
of `with_options`, which escapes all of it. A cell with a time shows how long ago that was; the page's script tells the
exact time, in the reader's zone, to who points at it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

#: The most characters of what is typed into one field beside a button.
MAX_TYPED = 200
#: The most characters of a state that is shown as a badge; longer texts are coloured only.
MAX_BADGE = 14
#: A text that is a figure, maybe with its unit: a column of these is aligned at the right.
FIGURE = re.compile(
    r"(= )?-?[\d,.]+(e[+-]\d+)?\+?( ?(%|/s|units?|(<?[\d,.]+ )?(ms|s|min|h|d)( \d+ (s|min|h))?))?|<1 ms"
)
#: Texts that say nothing; a narrow screen leaves them out.
NOTHING = ("", "-", "0")


#: The beginning of an option: its dashes, and its name up to the next dash. An option with a long value is left:
#: a narrow screen needs each place where a line may end.
OPTION = re.compile(r"""(?<![^\s`'"(\[])(--?(?=\S{1,32}(?!\S))[A-Za-z][A-Za-z0-9]*)""")
#: Elements whose lines do not break, or that hold no other elements.
UNBROKEN = frozenset({"pre", "option", "text", "title"})


class Text(TextElement):
    """An element whose text never breaks between the dashes and the name of an option, as in `--queue-timeout`.

    Each beginning of an option is an element of its own in the browser, but not here, where each costs the processor as
    much as a whole cell: a compiler's command has dozens. A character that joins would be in what a person selects.
    """

    def __init__(self, *, tag: str, text: str) -> None:
        self._words: ui.element | None = None
        super().__init__(tag=tag, text=text)

    def _text_to_model_text(self, text: str) -> None:
        words = None if self._words is None or self._words.is_deleted else self._words
        first, *others = [text] if self.tag in UNBROKEN else OPTION.split(text)
        super()._text_to_model_text("" if others else first)
        if others:
            if words is None:
                # One element around them all, because the cells of a narrow screen are grids.
                with self:
                    words = ui.element("span")
                if len(self.default_slot.children) > 1:
                    words.move(self, 0)
            words.props["innerHTML"] = with_options(text)
        elif words is not None:
            words.delete()
            words = None
        self._words = words


def with_options(text: str) -> str:
    """Return a text as HTML, with an element around each beginning of an option and everything else escaped."""
    return "".join(
        f'<span class="option">{escape(part)}</span>' if place % 2 else escape(part)
        for place, part in enumerate(OPTION.split(text))
    )


def node(tag: str, text: object = "", kind: str = "", **props: Any) -> TextElement:
    """Put an HTML element on the page. kind: its CSS classes. props: its attributes, `for_` for `for`."""
    made = Text(tag=tag, text=str(text))
    if kind:
        made.classes(kind)
    for name, value in props.items():
        if value is not None:
            made.props[name.rstrip("_").replace("_", "-")] = value
    return made


@dataclass(frozen=True)
class Cell:
    """One cell of a table, or one value of a list of facts.

    link: a path of the console. kind: CSS classes; a short text of the kind `state-…` is a badge. at: the time, as the
    gateway gives it, that the text is about. more: a second line, in small letters. title: what pointing at it tells.
    share: from 0 to 1, drawn as a bar before the text.
    """

    text: str
    link: str | None = None
    kind: str = ""
    at: str | None = None
    more: str = ""
    title: str | None = None
    share: float | None = None

    @property
    def badge(self) -> bool:
        """True if it is a state that stands out."""
        return self.kind.startswith("state-") and len(self.text) <= MAX_BADGE and FIGURE.fullmatch(self.text) is None

    @property
    def shape(self) -> tuple[object, ...]:
        """What cannot be changed in place."""
        return self.link, self.at is None, self.badge, bool(self.more), self.share is None


class Shown:
    """A cell that is on the page, as an element of its own."""

    def __init__(self, tag: str, cell: Cell, *, label: str | None = None) -> None:
        """label: the name of its column, which a narrow screen shows beside it."""
        self.cell, self._figure = cell, False
        self._outer = self._inner = node(tag, data_label=label)
        with self._outer:
            self._bar = None if cell.share is None else node("progress", max=1, aria_hidden="true")
            if cell.link is not None:
                self._inner = node("a", href=cell.link)
            elif cell.at is not None:
                self._inner = node("time")
            elif cell.badge or cell.more or cell.share is not None:
                self._inner = node("span")
            self._more = node("small", "", "more") if cell.more else None
        self._fill(cell, figure=False)

    @property
    def element(self) -> TextElement:
        """The element around the cell."""
        return self._outer

    def change(self, cell: Cell, *, figure: bool = False) -> None:
        """Show another cell of the same shape."""
        if (cell, figure) != (self.cell, self._figure):
            self._fill(cell, figure=figure)

    def _fill(self, cell: Cell, *, figure: bool) -> None:
        self.cell, self._figure = cell, figure
        self._inner.text = cell.text
        around = " ".join(
            word for word, is_so in (("figure", figure), ("none", cell.text in NOTHING and not cell.more)) if is_so
        )
        kind = f"badge {cell.kind}" if cell.badge else cell.kind
        if self._inner is self._outer:
            self._outer.classes(replace=f"{around} {kind}".strip())
        else:
            self._outer.classes(replace=around)
            self._inner.classes(replace=kind)
        if cell.at is not None:
            self._inner.props["datetime"] = cell.at
        if cell.title is not None:
            self._inner.props["title"] = cell.title
        if self._bar is not None:
            self._bar.props["value"] = cell.share
        if self._more is not None:
            self._more.text = cell.more


class Line:
    """Some cells on one line."""

    def __init__(self) -> None:
        self._place = node("p", kind="lead")
        self._shown: list[Shown] = []

    def show(self, cells: Sequence[Cell]) -> None:
        """Show these cells."""
        if [each.cell.shape for each in self._shown] != [cell.shape for cell in cells]:
            self._place.clear()
            with self._place:
                self._shown = [Shown("span", cell) for cell in cells]
        for shown, cell in zip(self._shown, cells, strict=True):
            shown.change(cell)


class Table:
    """A table whose rows are changed in place, so that a link keeps the focus when figures change."""

    def __init__(
        self,
        caption: str,
        columns: Sequence[str],
        *,
        empty: str,
        on_choice: Callable[[], None] | None = None,
    ) -> None:
        """empty: what the page says if there is no row. on_choice: rows have a box to choose them; told of a choice."""
        self._columns, self._empty, self._on_choice = columns, empty, on_choice
        self._rows: dict[str, tuple[ui.element, list[Shown]]] = {}
        self._chosen: set[str] = set()
        with node("div", kind="scroll") as self._place:
            with node("table"):
                node("caption", caption, "" if caption else "none")
                with node("thead"), node("tr"):
                    if on_choice is not None:
                        with node("th", kind="choose"):
                            node("input", type="checkbox", data_choose_all="", aria_label="Choose all rows")
                    self._heads = [node("th", name, scope="col") for name in columns]
                self._body = node("tbody")
        self._note = node("p", kind="empty")
        self._note.set_visibility(False)
        if on_choice is not None:
            ui.on("chosen", self._choose)

    @property
    def chosen(self) -> list[str]:
        """Keys of the chosen rows that are still on the page, in their order."""
        return [key for key in self._rows if key in self._chosen]

    def show(self, rows: Sequence[tuple[str, Sequence[Cell]]]) -> None:
        """Show these rows in this order, each with a key of its own."""
        self._note.text = self._empty
        self._note.set_visibility(not rows and bool(self._empty))
        self._place.set_visibility(bool(rows))
        wanted = dict(rows)
        figures = [_figures(column) for column in zip(*wanted.values(), strict=True)]
        for head, figure in zip(self._heads, figures, strict=False):
            head.classes(replace="figure" if figure else "")
        for key in [key for key in self._rows if key not in wanted]:
            self._rows.pop(key)[0].delete()
        for place, (key, cells) in enumerate(wanted.items()):
            known = self._rows.get(key)
            if known is None or [each.cell.shape for each in known[1]] != [each.shape for each in cells]:
                if known is not None:
                    known[0].delete()
                self._rows[key] = known = self._made(key, cells)
            row, shown = known
            for cell, each, figure in zip(cells, shown, figures, strict=True):
                each.change(cell, figure=figure)
            children = self._body.default_slot.children
            if place >= len(children) or children[place] is not row:
                row.move(self._body, place)

    def _made(self, key: str, cells: Sequence[Cell]) -> tuple[ui.element, list[Shown]]:
        with self._body, node("tr") as row:
            if self._on_choice is not None:
                with node("td", kind="choose"):
                    node("input", type="checkbox", data_choose=key, aria_label=f"Choose {key}")
            shown = [Shown("td", cell, label=name) for cell, name in zip(cells, self._columns, strict=True)]
        return row, shown

    def _choose(self, event: Any) -> None:
        """Take the keys that a page says are chosen. A page may send anything."""
        sent = event.args if isinstance(event.args, list) else []
        self._chosen = {key for key in sent if isinstance(key, str)} & self._rows.keys()
        assert self._on_choice is not None
        self._on_choice()


def _figures(column: Sequence[Cell]) -> bool:
    """True if a column has figures alone."""
    told = [cell.text for cell in column if cell.text not in ("", "-")]
    return bool(told) and all(FIGURE.fullmatch(text) for text in told) and not any(cell.more for cell in column)


def field_of(event: Any) -> tuple[Any, Any]:
    """Return the name and the value of the field that a page says was typed into. A page may send anything."""
    sent = event.args if isinstance(event.args, dict) else {}
    return sent.get("field"), sent.get("value")


class Typed:
    """What a person has typed into some fields beside the buttons that use it."""

    def __init__(
        self, fields: Mapping[str, tuple[str, str]], hints: Mapping[str, str], *, most: int = MAX_TYPED
    ) -> None:
        """Put the fields on the page. fields: name → label and what stands there at first. most: characters of each."""
        self._most = most
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
                    maxlength=most,
                )
        ui.on("field", self._type)

    def __getitem__(self, name: str) -> str:
        return self._values[name].strip()

    def _type(self, event: Any) -> None:
        name, value = field_of(event)
        if isinstance(name, str) and name in self._values and isinstance(value, str):
            self._values[name] = value[: self._most]


class Facts:
    """A list of names with their values, in the order in which the names first came."""

    def __init__(self) -> None:
        self._list = node("dl", kind="facts")
        self._shown: dict[str, tuple[TextElement, Shown]] = {}

    def show(self, facts: Mapping[str, Cell]) -> None:
        """Show each name with its value."""
        for name, (term, shown) in list(self._shown.items()):
            if name not in facts or facts[name].shape != shown.cell.shape:
                del self._shown[name]
                term.delete()
                shown.element.delete()
        for place, (name, cell) in enumerate(facts.items()):
            if name not in self._shown:
                with self._list:
                    self._shown[name] = made = node("dt", name), Shown("dd", cell)
                made[0].move(self._list, 2 * place)
                made[1].element.move(self._list, 2 * place + 1)
            self._shown[name][1].change(cell)
