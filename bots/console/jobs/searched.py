"""The filter of the page of jobs as a person writes and sees it: `label:build state:failed`, tabs, chips and lists."""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import tzinfo
from typing import Any
from urllib.parse import urlencode

from leasehold.errors import BadInput
from leasehold.states import JobState
from starlette.datastructures import QueryParams

from bots.cli import times
from bots.console.parts import node
from bots.console.words import ALL, count
from schema.filters import Direction, JobFilter, Sort

Record = Mapping[str, Any]

#: Fields of the filter that a request may have several times.
SEVERAL = ("state", "metadata", "properties")
ORDERS = {"sort": [each.value for each in Sort], "order": [each.value for each in Direction]}
#: Fields that are times.
TIMES = frozenset(name for name, info in JobFilter.model_fields.items() if "datetime" in str(info.annotation))
#: Short words for fields of the filter.
WORDS = {"meta": "metadata", "property": "properties", "class": "job_class"}
#: How a value with a space is written.
IN_QUOTES = "label:'my label'"
#: Text that can only be the id of a job.
JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: States whose tabs are there even if no job is in them.
USUAL = (JobState.QUEUED, JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED)
#: The most values in a list of known ones.
MAX_KNOWN = 200


def asked(query: QueryParams) -> dict[str, Any]:
    """Return what the URL says of the filter and the order, as the gateway takes it; empty fields say nothing."""
    found: dict[str, Any] = {}
    for name in (*JobFilter.model_fields, *ORDERS):
        given = [value for value in query.getlist(name) if value.strip()]
        if given:
            found[name] = given if name in SEVERAL else given[-1]
    return found


def written(search: str, zone: tzinfo) -> dict[str, Any]:
    """Return the filter that a person has written; a word without a field is a label. Raises BadInput.

    zone: that of the reader. Times without an offset are of this zone. Times may be written as in commands.
    """
    found: dict[str, Any] = {}
    try:
        words = shlex.split(search)
    except ValueError:
        raise BadInput("search", "a quotation mark is not closed") from None
    for word in words:
        name, colon, value = word.partition(":")
        field = WORDS.get(name, name) if colon else "label"
        if field not in JobFilter.model_fields and field not in ORDERS:
            known = ", ".join(word_of(each) for each in (*JobFilter.model_fields, *ORDERS))
            raise BadInput("search", f"there is no field '{name}': {known}")
        if field in SEVERAL:
            found.setdefault(field, []).append(value if colon else word)
        elif field in found:
            both = f"'{found[field]}' and '{value if colon else word}'"
            raise BadInput("search", f"has two for {word_of(field)}, {both}: one with a space is written {IN_QUOTES}")
        elif field in TIMES:
            found[field] = times.moment(value, option=word_of(field), is_past=True, zone=zone)
        else:
            found[field] = value if colon else word
    return found


def word_of(field: str) -> str:
    """Return the word by which a person writes a field."""
    return next((word for word, name in WORDS.items() if name == field), field)


def in_words(where: Record) -> str:
    """Return a filter as a person writes it: the reverse of `written`."""
    pairs = ((word_of(name), each) for name, given in where.items() for each in values(given))
    return " ".join(shlex.quote(f"{word}:{value}") for word, value in pairs)


def values(given: Any) -> list[str]:
    """Return the values of a field, which may have one or several."""
    return [*given] if isinstance(given, list) else [given]


def address(where: Record, **more: str | None) -> str:
    """Return the path of the page with this filter. more: fields that differ from it; None = without the field."""
    query = urlencode({name: value for name, value in {**where, **more}.items() if value is not None}, doseq=True)
    return f"/jobs?{query}" if query else "/jobs"


def without(where: Record, name: str, value: str) -> dict[str, Any]:
    """Return the filter without one value of a field."""
    left = [each for each in values(where[name]) if each != value]
    return {**{key: each for key, each in where.items() if key != name}, **({name: left} if left else {})}


def form(where: Record, typed: str | None) -> None:
    """Put the search field on the page, and below it a chip for each condition, which takes it away.

    typed: what the person has written, if it cannot be understood.
    """
    with node("form", kind="search", method="get", action="/jobs", role="search"):
        node(
            "input",
            type="search",
            name="q",
            defaultValue=in_words(where) if typed is None else typed,
            placeholder="label:build state:failed task:shop.charge, or a job's id",
            aria_label="Filter of the jobs",
            autocomplete="off",
            autocapitalize="none",
            spellcheck="false",
        )
        node("button", "Filter", "main", type="submit")
    if not where:
        return
    with node("div", kind="chips"):
        for name, given in where.items():
            for value in values(given):
                told = f"{word_of(name)}: {value}"
                href = address(without(where, name, value))
                node("a", f"{told} ×", "chip", href=href, aria_label=f"Take away {told}")
        node("a", "Clear", href="/jobs")


class Tabs:
    """A tab for each state, with the number of its jobs where that is known."""

    def __init__(self, where: Record) -> None:
        self._chosen = [*where.get("state", ())]
        # The counts of a pool's status are by instance.
        self._counted = where.keys() <= {"instance", "state", *ORDERS}
        self._instance = where.get("instance")
        self._tabs = {}
        with node("nav", kind="tabs", aria_label="States"):
            for state in (None, *ALL):
                wanted = [] if state is None else [state.value]
                current = "page" if self._chosen == wanted else None
                link = address(where, state=state)
                with node("a", state or "all", href=link, aria_current=current) as tab:
                    number = node("span", "", "count")
                if state is not None:
                    self._tabs[state] = tab, number
        self.show({})

    def show(self, status: Record) -> None:
        """Show the figures of a pool's status, and the tabs that have some."""
        instances = status.get("instances", {})
        jobs = status.get("jobs", {}) if self._instance is None else instances.get(self._instance, {})
        for state, (tab, number) in self._tabs.items():
            found = jobs.get(state, 0) if self._counted else 0
            number.text = count(found, at_least=state in status.get("at_least", ())) if found else ""
            tab.set_visibility(bool(found) or state in USUAL or state in self._chosen or not self._counted)


class Lists:
    """Lists of known values and of orders: choosing one opens the page with it."""

    def __init__(self, where: Record) -> None:
        self._where = where
        self._known: dict[str, list[str]] = {}
        self._places = {}
        with node("details", kind="lists"):
            node("summary", "Lists of instances, labels, bots and orders")
            with node("div", kind="acts"):
                for name in ("instance", "label", "bot", *ORDERS):
                    with node("label", f"{name} "):
                        self._places[name] = node("select", data_goes="", aria_label=name)
        for name in self._places:
            self.show(name, ORDERS.get(name, ()))

    def show(self, name: str, known: Collection[str]) -> None:
        """Put the known values of a field into its list, beside those that were known before."""
        given = self._where.get(name)
        before = self._known.get(name, [])
        order: Sequence[str] = (
            [*known] if name in ORDERS else sorted({*before, *known, *([given] if given else [])})[:MAX_KNOWN]
        )
        if before == order and name in self._known:
            return
        self._known[name] = [*order]
        self._places[name].clear()
        with self._places[name]:
            node("option", "as usual" if name in ORDERS else "any", value=address(self._where, **{name: None}))
            for each in order:
                node("option", each, value=address(self._where, **{name: each}), selected=each == given or None)
