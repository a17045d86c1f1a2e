"""The drawing of a graph: its nodes in levels from left to right, the edges between them, and the state of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from nicegui.elements.mixins.text_element import TextElement

from bots.cli.output import in_words
from bots.console.parts import node
from bots.console.words import text

Record = Mapping[str, Any]

#: The most nodes that are drawn.
MAX_DRAWN = 400
#: Size of the box of a node, and the space between levels and between boxes of one level, in pixels.
WIDTH, HEIGHT, BETWEEN, ABOVE, EDGE = 168, 40, 44, 10, 8
#: The most characters of a command in a box.
MAX_LETTERS = 22
#: Times that levels are ordered by what their nodes depend on, and by what depends on them.
ROUNDS = 4


class Drawing:
    """The drawing on the page, whose boxes change in place while the nodes and edges stay what they are."""

    def __init__(self) -> None:
        with node("div", kind="drawing", tabindex="0", role="region", aria_label="The graph, by levels") as self._frame:
            self._place = node("div")
        self._edges: dict[int, tuple[int, ...]] = {}
        self._boxes: dict[int, tuple[TextElement, TextElement]] = {}

    def show(self, nodes: Sequence[Record], *, whole: bool) -> None:
        """Draw the nodes. whole: they are all of the graph; a part of it is not drawn."""
        is_drawn = whole and 0 < len(nodes) <= MAX_DRAWN
        self._frame.set_visibility(is_drawn)
        if not is_drawn:
            return
        edges = {one["node"]: tuple(one["after"]) for one in nodes}
        if edges != self._edges:
            self._edges = edges
            self._draw(nodes)
        for one in nodes:
            box, title = self._boxes[one["node"]]
            box.classes(replace=f"box state-{one['state']}")
            title.text = f"node {one['node']}: {one['state']}\n{text(name_of(one))}"

    def _draw(self, nodes: Sequence[Record]) -> None:
        places = placed({one["node"]: one["depth"] for one in nodes}, self._edges)
        wide = max(x for x, _ in places.values()) + WIDTH + EDGE
        high = max(y for _, y in places.values()) + HEIGHT + EDGE
        self._place.clear()
        self._boxes = {}
        with self._place, node("svg", viewBox=f"0 0 {wide} {high}", width=wide, height=high):
            node("path", kind="edges", d=" ".join(_lines(places, self._edges)))
            for one in nodes:
                x, y = places[one["node"]]
                with node("a", href=one["job"] and f"/jobs/{one['job']}"):
                    box = node("rect", x=x, y=y, width=WIDTH, height=HEIGHT, rx=6)
                    title = node("title")
                    node("text", f"{one['node']}", "number", x=x + 9, y=y + 16)
                    node("text", _short(name_of(one)), x=x + 9, y=y + 31)
                self._boxes[one["node"]] = box, title


def name_of(one: Record) -> str:
    """Return what a node runs, or its label."""
    return in_words(one["command"], one.get("arguments")) if one["command"] else one["label"] or "(no longer stored)"


def _short(name: str) -> str:
    shown = text(name)
    return shown if len(shown) <= MAX_LETTERS else shown[: MAX_LETTERS - 1] + "…"


def placed(depths: Mapping[int, int], edges: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, int]]:
    """Return the left upper corner of each node's box: a column for each depth, lines between them short.

    depths: node → depth. edges: node → the nodes that it waits for. Columns are ordered by the mean place of what their
    nodes are connected with, to and fro (Sugiyama's barycentres).
    """
    levels: dict[int, list[int]] = {}
    for number in sorted(depths):
        levels.setdefault(depths[number], []).append(number)
    following: dict[int, list[int]] = {number: [] for number in depths}
    for number, parents in edges.items():
        for parent in parents:
            following.setdefault(parent, []).append(number)
    row = {number: float(place) for level in levels.values() for place, number in enumerate(level)}
    for turn in range(ROUNDS):
        near = edges if turn % 2 == 0 else following
        for depth in sorted(levels, reverse=turn % 2 == 1):
            means = {
                number: _mean([row[each] for each in near[number] if each in row], row[number])
                for number in levels[depth]
            }
            levels[depth].sort(key=lambda number: (means[number], number))
            row |= {number: float(place) for place, number in enumerate(levels[depth])}
    tallest = max(map(len, levels.values()))
    places = {}
    for column, depth in enumerate(sorted(levels)):
        top = EDGE + (tallest - len(levels[depth])) * (HEIGHT + ABOVE) // 2
        for place, number in enumerate(levels[depth]):
            places[number] = EDGE + column * (WIDTH + BETWEEN), top + place * (HEIGHT + ABOVE)
    return places


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _lines(places: Mapping[int, tuple[int, int]], edges: Mapping[int, Sequence[int]]) -> list[str]:
    """Return a curve for each edge, as parts of the path of an SVG."""
    found = []
    for number, parents in edges.items():
        for parent in (each for each in parents if each in places):
            (x, y), (to_x, to_y) = places[parent], places[number]
            x, y, to_y = x + WIDTH, y + HEIGHT // 2, to_y + HEIGHT // 2
            found.append(f"M{x} {y}C{x + BETWEEN // 2} {y} {to_x - BETWEEN // 2} {to_y} {to_x} {to_y}")
    return found
