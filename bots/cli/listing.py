"""The commands that list: jobs that pass a filter, and the values that jobs have for a key of metadata."""

import click
from leasehold import wire
from leasehold.client import Client, Listed
from leasehold.errors import BadInput, NotFound

from bots.cli import output
from bots.cli.caller import Caller, caller_options, whole_id
from bots.cli.filters import filter_options
from bots.cli.output import Record
from bots.cli.watching import shown, watch_option
from schema import readable, validation
from schema.filters import Direction, Sort
from schema.readable import tell


def _next(found: Listed, limit: int, where: Record, asked: Record) -> str:
    """Return the option that leads to the next page.

    A full page in the order of submits goes on before its last job, which is shorter than a cursor.
    """
    is_by_submit = asked["sort"] in (None, Sort.SUBMITTED) and asked["order"] in (None, Direction.DESCENDING)
    if len(found.jobs) < limit or not is_by_submit or where.keys() & {"ended_after", "ended_before"}:
        return f"--cursor {found.next}"
    return f"--before {readable.short_ids([job['id'] for job in found.jobs])[-1]}"


def _columns(_context: click.Context, _option: click.Parameter, value: str | None) -> list[str]:
    """Parse the names of columns. Raises BadInput for a name that there is not."""
    found = [] if value is None else [name.strip().lower() for name in value.split(",")]
    for name in found:
        if name not in output.COLUMNS:
            meant = wire.suggestion(name, output.COLUMNS) or f": take of {', '.join(output.COLUMNS)}"
            raise BadInput("--columns", f"there is no column '{wire.escaped(name, 40)}'{meant}")
    return list(dict.fromkeys(found))


@click.command("list")
@filter_options
@click.option(
    "--sort",
    type=click.Choice([sort.value for sort in Sort]),
    help="Sort by this [default: the end if the filter names it, else the submit].",
)
@click.option(
    "--order",
    type=click.Choice([each.value for each in Direction]),
    help="[default: the newest, or the most urgent, first].",
)
@click.option("--limit", type=click.IntRange(1, wire.MAX_LIST), help="[default: 50; with --results all].")
@click.option("--before", metavar="ID", help="Jobs submitted before this one: mostly the next page.")
@click.option("--cursor", metavar="TEXT", help="The next page, if the one before has printed this on standard error.")
@click.option("--forecast", is_flag=True, help="Also tell when waiting jobs will start, 50 of each page at most.")
@click.option(
    "--columns",
    metavar="NAME,…",
    callback=_columns,
    help=f"Show these columns, in this order, and commands whole: {', '.join(output.COLUMNS)}.",
)
@click.option(
    "--results", is_flag=True, help="Print an object of JSON on a line for each job, with its metadata and its result."
)
@watch_option
@caller_options
def list_jobs(
    caller: Caller,
    /,
    *,
    where: Record,
    limit: int | None,
    cursor: str | None,
    forecast: bool,
    columns: list[str],
    results: bool,
    watch: float | None,
    **asked: str | None,
) -> None:
    """List the jobs that pass all filters, by default the newest first.

    The options from --state to --ended-before are filters. A TIME has its offset,
    such as 2026-03-01T12:00:00Z, or is one of this machine's zone, such as '2026-03-01 12:00'
    or 12:00, which is the last one.

    \b
    leasehold list --state running --sort started --order asc
    leasehold list --meta build=1234 --state failed
    leasehold list --columns id,state,command,label
    leasehold list --meta run=a --state succeeded --results
    """
    if results and (columns or watch is not None or forecast):
        raise BadInput("--results", "does not go with --columns, --forecast and --watch")

    def look(client: Client) -> None:
        if asked["before"] is not None:
            asked["before"] = whole_id(client, asked["before"])
        most = 50 if limit is None else limit
        if results:
            found = _print_results(client, limit, cursor, {**where, **asked})
        else:
            foreseen = {"forecast": "true"} if forecast or "starts" in columns else {}
            found = client.list(limit=most, cursor=cursor, **where, **asked, **foreseen)
            readable.print_json(found.jobs) if caller.json else output.list_jobs(found.jobs, columns)
        if found.next is not None and watch is None:
            click.echo(f"next page: {_next(found, most, where, asked)}", err=True)

    shown(caller, watch, look)


def _print_results(client: Client, limit: int | None, cursor: str | None, asked: Record) -> Listed:
    """Print jobs with what they have left, a page after the other. Returns the last page.

    limit: None = all of them.
    """
    while True:
        page = client.list(limit=limit or wire.MAX_LIST, cursor=cursor, **asked)
        left = _left(client, [job["id"] for job in page.jobs])
        for job in page.jobs:
            if job["id"] in left:
                readable.print_json({**job, "exit_code": None, "has_result": False, "result": None, **left[job["id"]]})
        cursor = page.next
        if cursor is None or limit is not None:
            return page


def _left(client: Client, jobs: list[str]) -> dict[str, Record]:
    """Return what these jobs have left, by id, without those that have been deleted since they were listed."""
    try:
        return {each["id"]: each for each in client.results(jobs)}
    except NotFound:
        if len(jobs) == 1:
            return {}
        half = len(jobs) // 2
        return _left(client, jobs[:half]) | _left(client, jobs[half:])


@click.command()
@click.argument("key")
@click.option("--contains", metavar="TEXT", help="Values with this text in them, in whatever case.")
@click.option("--instance", metavar="NAME", help="Values of jobs of this instance.")
@click.option("--limit", type=click.IntRange(1), default=wire.MAX_LIST, show_default=True)
@caller_options
def metadata(caller: Caller, /, key: str, contains: str | None, instance: str | None, limit: int) -> None:
    """List the values that jobs have for a KEY of metadata."""
    validation.check_metadata_key("KEY", key)
    with caller.client() as client:
        found = client.values(key, contains=contains, instance=instance, limit=limit)
    if caller.json:
        readable.print_json(found)
    else:
        for value in found:
            click.echo(output.plain(value))
        if not found:
            tell(f"no job has such a value of {output.plain(key)}")
    if len(found) == limit:
        tell("there may be more values: give a larger --limit, or --contains")


COMMANDS: tuple[click.Command, ...] = (list_jobs, metadata)
