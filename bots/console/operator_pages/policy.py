"""The page of policy: settings in force, versions, simulations, weights that are tried, and what operators have set."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leasehold.calls.operators import Canary, Decision, PolicyVersion, Scores, SettingsInForce, Terms
from leasehold.client import Client
from leasehold.errors import BadInput, Conflict, NotFound
from nicegui import ui

from bots.console.operator_pages.simulations import show_reports
from bots.console.parts import Cell, Table, field_of, node
from bots.console.settings_tables import Source, show_tables
from bots.console.view import SLOW, View
from bots.console.words import ago, text, time
from schema.readable import plural

#: The most versions on the page; and words for a guard that holds, is broken, or is not known.
MAX_VERSIONS = 10
HELD = {True: "holds", False: "is broken", None: "is not known yet"}
#: The most sampled decisions, and candidates of one of them, on the page.
MAX_DECISIONS, MAX_CANDIDATES = 20, 30
#: The terms of a score, with the number of their colour.
TERMS = {"priority": 3, "capacity": 0, "locality": 1, "success": 4}
#: The fields of weights, and the other numbers that can be tried.
NUMBERS = (*TERMS, "load_power")
#: Size of the bars of one candidate, in units of its own, and the space at both ends for figures.
WIDTH, HEIGHT, MARGIN = 480, 30, 4
RESOURCES = (
    Source("Scheduling", "scheduling", single=True),
    Source("Classes", "classes"),
    Source("Service levels", "service-levels"),
    Source("Cohorts", "cohorts"),
    Source("Execution windows", "windows"),
    Source("Submit rules", "submit-rules"),
    Source("Ceilings of run times and waits", "ceilings"),
)


def show_policy(view: View) -> None:
    """Put the page into `view`; the URL names the decision on which weights are tried."""
    _show_settings(view)
    _show_versions(view)
    show_reports(view)
    Trial(view)
    show_tables(view, sources=RESOURCES)


def _show_settings(view: View) -> None:
    node("h2", "Settings in force")
    processes = Table(
        "By kind of process; two rows of a kind mean that its processes do not agree",
        ("process", "names", "file", "in force since", "a changed file that was refused"),
        empty="No process has told its settings.",
    )
    weights = Table(
        "How bots are chosen", ("assigner", "strategy", *TERMS, "capacity term", "load power", "sample"), empty=""
    )
    with node("details"):
        node("summary", "All settings")
        everything = Table("Without secrets", ("process", "setting", "value"), empty="")

    async def refresh() -> None:
        found = await view.ask(lambda client: client.operators.settings())
        processes.show([(str(number), _in_force(each)) for number, each in enumerate(found)])
        weights.show([(str(number), cells) for number, cells in enumerate(_weights(found))])
        rows = [
            (
                f"{number} {name}",
                [Cell(f"{each['kind']} {', '.join(each['processes'])}"), Cell(name), Cell(text(value))],
            )
            for number, each in enumerate(found)
            for name, value in flat(each["settings"])
        ]
        everything.show(rows)

    view.live(refresh, seconds=SLOW * 2)


def _show_versions(view: View) -> None:
    node("h2", "Versions")
    trial = node("p", kind="note")
    table = Table(
        "What changed it, newest first; leasehold policy tells more, takes versions back and tries them on a part",
        ("version", "state", "made", "by", "values changed", "reason"),
        empty="There is no version yet.",
    )

    async def refresh() -> None:
        found = await view.ask(lambda client: client.operators.policies(limit=MAX_VERSIONS))
        table.show([(str(each["id"]), _version(each)) for each in found])
        try:
            canary = await view.ask(lambda client: client.operators.canary())
        except Conflict as unreadable:
            trial.set_text(str(unreadable))
        else:
            trial.set_text("" if canary is None else told_of_canary(canary))

    view.live(refresh, seconds=SLOW)


def _version(each: PolicyVersion) -> list[Cell]:
    state = "in force" if each["in_force"] else "draft" if each["drafted"] else ""
    return [
        Cell(str(each["id"])),
        Cell(state, kind="state-succeeded" if each["in_force"] else ""),
        ago(each["made_at"]),
        Cell(text(each["author"])),
        Cell(str(each["changed"])),
        Cell(text(each["reason"])),
    ]


def told_of_canary(canary: Canary) -> str:
    """Tell in a sentence how the trial of a version goes, or went."""
    where = f"{len(canary['reached'])} of {len(canary['names'])} {canary['kind']}s"
    if canary["outcome"] is not None:
        return f"Version {canary['policy']} was tried on {where}, and {canary['outcome']}: {canary['why']}."
    guards = ", ".join(f"{each['guard']} {HELD[each['holds']]}" for each in canary["guards"])
    step = f"step {canary['step'] + 1} of {len(canary['steps'])}"
    return f"Version {canary['policy']} is tried on {where}, {step} since {time(canary['step_at'])}: {guards}."


def _in_force(each: SettingsInForce) -> list[Cell]:
    return [
        Cell(each["kind"]),
        Cell(text(", ".join(each["processes"]))),
        Cell(text(each["file"] or "none: defaults and the environment")),
        ago(each["changed_at"]),
        Cell(each["error"] or "", kind="state-dead" if each["error"] else ""),
    ]


def _weights(found: Sequence[SettingsInForce]) -> Iterator[list[Cell]]:
    """Yield the cells of the weights of each assigner entry."""
    for each in found:
        for number, entry in enumerate(each["settings"].get("assigners", ())):
            strategy = entry["strategy"]
            yield [
                Cell(text(f"{', '.join(each['processes'])}: [[assigners]] {number}, {entry['kind']}")),
                Cell(text(strategy["kind"])),
                *(Cell(f"{strategy['weights'][name]:g}") for name in TERMS),
                Cell(text(strategy["capacity_term"])),
                Cell(f"{strategy['load_power']:g}"),
                Cell(text(strategy["sampling"]["sample_size"]) if strategy["sampling"]["enabled"] else "off"),
            ]


def flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name of each setting with its value."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for number, each in enumerate(value):
                yield from flat(each, f"{before}{key}[{number}].")
        else:
            yield before + key, value


class Trial:
    """The part in which a sampled decision is made again with weights that are typed."""

    def __init__(self, view: View) -> None:
        self._view = view
        given = view.query.get("decision", "")
        self._decision = int(given) if given.isascii() and given.isdigit() and 0 < int(given) < 2**63 else None
        self._typed = dict.fromkeys((*NUMBERS, "capacity_term"), "")
        node("h2", "Try weights")
        self._about = node("p", kind="note")
        self._fields = {}
        with node("div", kind="acts"):
            for name in NUMBERS:
                with node("label", f"{name.replace('_', ' ')} "):
                    self._fields[name] = node(
                        "input",
                        type="text",
                        data_field=name,
                        inputmode="decimal",
                        size=7,
                        autocomplete="off",
                        maxlength=20,
                    )
            with node("label", "capacity term "), node("select", data_field="capacity_term"):
                for value in ("", "raw", "normalised"):
                    node("option", value or "as decided", value=value)
            node("button", "Try these weights", type="button").on("click", self._try, [])
        ui.on("field", self._type)
        self._told = node("p", aria_live="polite")
        self._bars = Bars()
        columns = ("decision", "assigner", "job", "went to", "of candidates", "strategy")
        self._decisions = Table("Decisions to try them on", columns, empty="No decision has been sampled yet.")
        self._first = True
        view.live(self._refresh, seconds=SLOW)

    def _type(self, event: Any) -> None:
        name, value = field_of(event)
        if isinstance(name, str) and name in self._typed and isinstance(value, str):
            self._typed[name] = value[:20].strip()

    async def _try(self) -> None:
        await self._view.doing(self._score)

    async def _refresh(self) -> None:
        newest = await self._view.ask(lambda client: client.operators.decisions(limit=MAX_DECISIONS))
        # Weights decide nothing where there is one candidate.
        found = sorted(newest, key=lambda each: each["candidates"] < 2)
        self._decisions.show([(str(each["id"]), _decision(each)) for each in found])
        if self._first and (found or self._decision is not None):
            self._decision = self._decision or found[0]["id"]
            await self._score()
            self._first = False

    async def _score(self) -> None:
        if self._decision is None:
            raise NotFound("decision: none has been sampled yet; an assigner samples one when it places a job")
        asked = self._request()
        decision = self._decision
        found = await self._view.ask(lambda client: _scores(client, decision, asked))
        for name in TERMS:
            self._fields[name].props["placeholder"] = f"{found['in_force'][name]:g}"
        self._about.text = about(found)
        self._told.text = told(found)
        self._bars.show(found)

    def _request(self) -> dict[str, Any]:
        """Return what is typed. Raises BadInput for what is no number."""
        numbers = {}
        for name in NUMBERS:
            if self._typed[name]:
                try:
                    numbers[name] = float(self._typed[name])
                except ValueError:
                    raise BadInput(name, "is not a number") from None
        return {
            "load_power": numbers.pop("load_power", None),
            "weights": numbers,
            "capacity_term": self._typed["capacity_term"] or None,
        }


def _scores(client: Client, decision: int, asked: Mapping[str, Any]) -> Scores:
    return client.operators.scores(decision, **asked)


def _decision(each: Decision) -> list[Cell]:
    return [
        Cell(time(each["at"]), f"/policy?decision={each['id']}", "time"),
        Cell(text(each["assigner"])),
        Cell(each["job"], f"/jobs/{each['job']}", "id"),
        Cell(text(each["bot"]), f"/bots/{each['bot']}"),
        Cell(text(each["candidates"])),
        Cell(text(each["strategy"])),
    ]


def about(found: Scores) -> str:
    """Return one sentence on the decision, and one if its strategy does not go by these scores."""
    decision = found["decision"]
    said = (
        f"Job {decision['job']} went to {decision['bot']}, of {plural(decision['candidates'], 'candidate')}, "
        f"at {time(decision['at'])}. A field left empty stands for what it was decided by."
    )
    if not found["by_weights"]:
        said += f" The strategy {decision['strategy']} does not choose by these scores."
    return said


def told(found: Scores) -> str:
    """Return one sentence on the bot that would be chosen now."""
    if found["chosen"] is None:
        return "The strategy goes by more than a sample holds, so that nobody can say which bot it would choose."
    if found["chosen"] == found["decision"]["bot"]:
        return f"With these weights the job goes to {found['chosen']} too."
    return f"With these weights the job goes to {found['chosen']}, not to {found['decision']['bot']}."


class Bars:
    """Two bars for each candidate: its score as tried and, thinner, the one by which it was decided."""

    def __init__(self) -> None:
        with node("div", kind="key"):
            for name, colour in TERMS.items():
                node("span", f"■ {name}", f"line-{colour}")
            node("span", "upper bar: as tried; lower bar: as decided; the line is zero", "note")
        self._place = node("div", kind="bars")

    def show(self, found: Scores) -> None:
        """Draw the candidates with the highest tried scores, on one scale."""
        shown = found["candidates"][:MAX_CANDIDATES]
        ends = [end for each in shown for terms in (each["tried"], each["in_force"]) for end in extent(terms)]
        low, high = min(ends, default=0.0), max(ends, default=0.0)
        scale = (WIDTH - 2 * MARGIN) / ((high - low) or 1.0)
        zero = MARGIN - low * scale
        self._place.clear()
        with self._place:
            for each in shown:
                marks = [
                    mark
                    for name, mark in ((found["chosen"], "takes the job"), (found["decision"]["bot"], "took it"))
                    if name == each["bot"]
                ]
                node("span", each["bot"] + (f" ({', '.join(marks)})" if marks else ""), "chosen" if marks else "")
                said = f"tried {_terms(each['tried'])}; decided {_terms(each['in_force'])}"
                with node("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{each['bot']}: {said}"):
                    node("title", said)
                    for terms, top, height in ((each["tried"], 2, 16), (each["in_force"], 20, 7)):
                        for name, start, width in segments(terms):
                            x = zero + (start if width > 0 else start + width) * scale
                            node("rect", kind=f"fill-{TERMS[name]}", x=f"{x:.1f}", y=top, height=height,
                                 width=f"{abs(width) * scale:.1f}")  # fmt: skip
                    node("line", kind="axis", x1=f"{zero:.1f}", x2=f"{zero:.1f}", y1=0, y2=HEIGHT)
                node("span", f"{each['tried']['total']:g} (decided: {each['in_force']['total']:g})", "note")


def segments(terms: Terms) -> list[tuple[str, float, float]]:
    """Return the term, start and signed width of each segment: positive terms right of zero, negative ones left."""
    right = left = 0.0
    found = []
    for name in TERMS:
        value: float = terms[name]  # type: ignore[literal-required]
        if value > 0:
            found.append((name, right, value))
            right += value
        elif value < 0:
            found.append((name, left, value))
            left += value
    return found


def extent(terms: Terms) -> tuple[float, float]:
    """Return how far the segments reach left and right of zero."""
    values = [width for _, _, width in segments(terms)]
    return sum(each for each in values if each < 0), sum(each for each in values if each > 0)


def _terms(terms: Terms) -> str:
    parts = ", ".join(f"{name} {terms[name]:+g}" for name in TERMS if terms[name])  # type: ignore[literal-required]
    return f"{terms['total']:g}" + (f" ({parts})" if parts else "")
