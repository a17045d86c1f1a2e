"""The pages of the console: which path shows what, and to whom."""

from collections.abc import Callable
from dataclasses import dataclass

from nicegui import ui
from starlette.responses import Response

from bots.console import builds, graphs, pool, schedules, settings_tables
from bots.console.jobs import job, job_list
from bots.console.operator_pages import bots, health, policy, preemptions, simulations, tenants
from bots.console.view import Link, View


@dataclass(frozen=True)
class Page:
    """A page that the bar at the top names. of_operators: submitters neither see its name nor may read it.

    show: puts it into a view, or answers that it is elsewhere.
    """

    path: str
    name: str
    show: Callable[[View], Response | None]
    of_operators: bool = False


PAGES = (
    Page("/", "Pool", pool.show),
    Page("/jobs", "Jobs", job_list.show),
    Page("/graphs", "Graphs", graphs.show_graphs),
    Page("/builds", "Builds", builds.show),
    Page("/schedules", "Schedules", schedules.show),
    Page("/bots", "Bots", bots.show_bots, of_operators=True),
    Page("/tenants", "Tenants", tenants.show, of_operators=True),
    Page("/preemptions", "Preemptions", preemptions.show, of_operators=True),
    Page("/limits", "Limits", settings_tables.show_limits, of_operators=True),
    Page("/policy", "Policy", policy.show_policy, of_operators=True),
    Page("/health", "Health", health.show_health, of_operators=True),
)
LINKS = tuple(Link(page.path, page.name, page.of_operators) for page in PAGES)


def register() -> None:
    """Register the pages with NiceGUI."""
    for page in PAGES:
        _register(page)

    @ui.page("/jobs/{id}")
    def show_job(id: str) -> None:
        with View("Job", LINKS, of="Jobs") as view:
            job.show(view, id)

    @ui.page("/graphs/{id}")
    def show_graph(id: str) -> None:
        with View("Graph", LINKS, of="Graphs") as view:
            graphs.show_graph(view, id)

    @ui.page("/bots/{name}")
    def show_bot(name: str) -> None:
        with View("Bot", LINKS, of="Bots") as view:
            bots.show_bot(view, name) if view.is_operator else view.refuse()

    @ui.page("/simulations/{id}")
    def show_simulation(id: str) -> None:
        with View("Simulation", LINKS, of="Policy") as view:
            simulations.show_simulation(view, id) if view.is_operator else view.refuse()


def _register(page: Page) -> None:
    def handler() -> Response | None:
        with View(page.name, LINKS) as view:
            if page.of_operators and not view.is_operator:
                view.refuse()
                return None
            return page.show(view)

    ui.page(page.path)(handler)
