"""The operator's commands that need no gateway: configuration, database, tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
import psycopg
from leasehold.errors import BadInput, Forbidden, LeaseholdError, NotReady
from leasehold.wire import escaped, suggestion

from assigner.cli import mistakes
from assigner.cli.completion import Named
from assigner.cli.output import as_json, duration
from assigner.config import loading
from assigner.settings import Installation, first_line, require_safe_way
from schema import clock, readable
from schema.diagnostics import doctor, invariants, server
from schema.diagnostics.checks import Check, Verdict
from schema.postgres import embedded, migrate
from schema.postgres.connection import Connection
from schema.postgres.urls import libpq_url
from schema.readable import Column, Group, moment, print_json, print_line, table, tell
from schema.sql import SCHEMA
from schema.tenancy import instances, restored, roles, tokens

#: Folders of `ops/` whose files operators copy and change. pyproject.toml puts the same ones into the wheel.
EXAMPLE_FOLDERS = ("prometheus", "grafana", "systemd", "container", "haproxy", "kubernetes")

pass_installation = click.make_pass_decorator(Installation)


@click.group("config", cls=Group)
def config_group() -> None:
    """The configuration file."""


@config_group.command("check")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@as_json
@pass_installation
def check_config(installation: Installation, file: Path | None, as_json: bool) -> int:
    """Check the environment and FILE, or the file that commands would use, without starting anything.

    Each problem is a line. What is probably a mistake is a warning. Exit 2 for what is not valid, and if jobs would
    wait for ever. Where the pool's database answers, it is told how the policy in force differs from the file.
    """
    path = file or installation.config
    try:
        loaded = loading.load_with_source(path, installation.sections, installation.environ)
    except loading.InvalidConfiguration as invalid:
        return _told_problems([f"{where}: {reason}" for where, reason in invalid.problems])
    found, notes = mistakes.mistakes(loaded.settings), mistakes.dominance(loaded.settings)
    notes = [*notes, *mistakes.told_of_file(installation, loaded.settings)]
    told, fatal = (
        [f"{loaded.source.named(each.path)}: {each.reason}" for each in found if each.is_fatal is is_fatal]
        for is_fatal in (False, True)
    )
    if not as_json or fatal:
        for warning in told:
            tell(f"warning: {warning}")
    if fatal:
        return _told_problems(fatal)
    if as_json:
        print_json({"file": None if path is None else str(path), "ok": True, "warnings": told, "notes": notes})
        return 0
    for note in notes:
        print_line("", note)
    click.echo(f"{path or 'the defaults'}: ok")
    return 0


def _told_problems(problems: Sequence[str]) -> int:
    """Print one line for each problem; return the exit code."""
    for problem in problems:
        tell(f"error: {problem}")
    return 2


@config_group.command("show")
@as_json
@pass_installation
def show_config(installation: Installation, as_json: bool) -> None:
    """Print every setting in force, with defaults filled in and passwords hidden."""
    shown = loading.masked(installation.settings)
    if as_json:
        print_json(shown)
    else:
        click.echo(f"# {installation.described}")
        click.echo(loading.as_toml(shown), nl=False)


def examples() -> dict[str, Path]:
    """The files that operators copy and change, by their names: of the installed wheel, or of the checkout's `ops/`.

    A wheel has them all in `assigner/examples/`. Nothing is there in an editable installation, which uses the checkout.
    """
    package = Path(__file__).parents[1]
    root = next(each for each in (package / "examples", package.parent / "ops") if each.is_dir())
    found = [root / "leasehold.toml"]
    found += [file for folder in EXAMPLE_FOLDERS for file in sorted((root / folder).rglob("*")) if file.is_file()]
    return {file.relative_to(root).as_posix(): file for file in found}


@config_group.command("example")
@click.argument("name", metavar="[FILE]", default="leasehold.toml", type=Named(examples))
@click.option("--list", "listed", is_flag=True, help="List the files and where they are, instead of printing one.")
@as_json
def print_example(name: str, listed: bool, as_json: bool) -> None:
    """Print an example FILE: the configuration with every key and its default, or a file for a program beside the pool.

    These are alert rules for Prometheus and what else `--list` names.
    """
    known = examples()
    if listed:
        if as_json:
            print_json({each: str(path) for each, path in known.items()})
        else:
            table(["file", "path"], list(known.items()))
        return
    if name not in known:
        raise BadInput("FILE", f"'{escaped(name, 80)}' is not one of {', '.join(known)}{suggestion(name, known)}")
    text = known[name].read_text()
    if as_json:
        print_json({"file": name, "text": text})
    else:
        click.echo(text, nl=False)


@click.group("db", cls=Group)
def db_group() -> None:
    """The database."""


@db_group.command("upgrade")
@as_json
@pass_installation
def upgrade_database(installation: Installation, as_json: bool) -> None:
    """Bring the schema to the version that this program needs. Safe to repeat, also by several processes at once."""
    with installation.command_database("upgrade", ready=False) as database:
        require_safe_way(database)
        try:
            version = migrate.upgrade(database)
        except psycopg.errors.InsufficientPrivilege as error:
            raise Forbidden(f"database: {first_line(error)}; run this as the role that owns the schema") from error
    _print_version(installation, version, as_json=as_json)


@db_group.command("status")
@as_json
@pass_installation
def show_version(installation: Installation, as_json: bool) -> int:
    """Print the schema version. Exit 3 if it is not the one that this program needs, or if `db restored` has to be run.

    That is so after a restored dump, and after pg_upgrade.
    """
    with installation.command_database("status", ready=False) as database:
        version = migrate.status(database)
        _print_version(installation, version, as_json=as_json)
        migrate.require(database)
    return 0


@db_group.command("restored")
@as_json
@pass_installation
def continue_fences(installation: Installation, as_json: bool) -> None:
    """Let fences continue above all earlier ones after a restored dump or pg_upgrade, before any process starts.

    Until then gateways and assigners of such a database exit with 3. Run this as the owner of the schema. It changes no
    job, and does no harm where nothing was restored: do it too after a start from a snapshot of the data directory.
    """
    with installation.command_database("restored", ready=False) as database:
        require_safe_way(database)
        done = database.run(lambda connection: restored.continue_fences(connection, actor="local"))
    if as_json:
        print_json(asdict(done))
        return
    click.echo(installation.described)
    found = "the database has come to this server" if done.moved else "the database was in its place already"
    click.echo(f"{found}; fences of new grants begin at {done.first_fence}")


def _print_version(installation: Installation, version: migrate.Version, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"schema": version.current, "needed": version.needed, "moved": version.moved, "ready": version.ready}
        )
    else:
        click.echo(installation.described)
        click.echo(f"schema {version.current or 'none'}, need {version.needed}")


@db_group.command("url")
@as_json
@pass_installation
def print_database_url(installation: Installation, as_json: bool) -> None:
    """Print the URL of the database, as it is configured, for programs that submit in their own transactions."""
    url = installation.settings.database.url.get_secret_value()
    if url == "embedded":
        if not installation.data.is_dir():
            raise BadInput("--data", f"{installation.data} is not there; `leasehold up` makes it with its PostgreSQL")
        cluster = embedded.Cluster.find(installation.data)
        _ = cluster.pid  # the programs' connections do not start it
        url = cluster.url
    url = libpq_url(url)
    if as_json:
        print_json({"url": url})
    else:
        click.echo(url)


@db_group.command("grant-submit")
@click.argument("role", metavar="ROLE")
@pass_installation
def grant_submit(installation: Installation, role: str) -> None:
    """Let a role of the database submit jobs in its own transactions, and nothing else.

    The role may then call `leasehold.submit`. Run this as the owner of the schema: others cannot grant it. REVOKE takes
    it back, as with any right.
    """
    with installation.command_database("grant") as database:
        database.run(lambda connection: roles.grant_submit(connection, role, actor="local"))
    click.echo(installation.described)
    click.echo(f"{escaped(role, roles.MAX_ROLE)} may call {SCHEMA}.submit")


@db_group.command("grant-process")
@click.argument("role", metavar="ROLE")
@pass_installation
def grant_process(installation: Installation, role: str) -> None:
    """Let gateways and assigners run as a role of the database that reads and writes rows, and owns no table.

    The role has these rights after an upgrade too. Run this as the owner of the schema: others cannot grant it.
    """
    with installation.command_database("grant") as database:
        database.run(lambda connection: roles.grant_process(connection, role, actor="local"))
    click.echo(installation.described)
    click.echo(f"gateways and assigners may run as {escaped(role, roles.MAX_ROLE)}")


@db_group.command("verify")
@as_json
@pass_installation
def verify_database(installation: Installation, as_json: bool) -> None:
    """Count the rows that break each safety invariant, in one snapshot. Exit 1 if there are any."""
    with installation.command_database("verify") as database:
        findings = invariants.verify(database)
    if as_json:
        print_json({finding.id: asdict(finding) for finding in findings})
    else:
        click.echo(installation.described)
        has_samples = any(each.sample for each in findings)
        rows = [
            (each.id, each.rows, *([" ".join(each.sample) or None] if has_samples else []), each.title)
            for each in findings
        ]
        example = [Column("for example", least=16)] if has_samples else []
        table(["invariant", "rows", *example, Column("counts", folds=True)], rows)
    broken = [finding.id for finding in findings if finding.rows]
    if broken:
        raise LeaseholdError(f"{len(broken)} of {len(findings)} invariants do not hold: {', '.join(broken)}")


@click.group("token", cls=Group)
def token_group() -> None:
    """Tokens for callers, bots and operators."""


@token_group.command("create")
@click.argument("kind", type=click.Choice([kind.value for kind in tokens.Kind]))
@click.option("--instance", metavar="NAME", help="The only instance it may use [all].")
@click.option("--create", is_flag=True, help="Make the instance if it is not there.")
@click.option("--bot", metavar="NAME", help="The bot it is for; a trailing * stands for any ending.")
@click.option("--priority-ceiling", type=int, metavar="N", help="The most urgent (lowest) priority it may ask for.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="KEY=VALUE",
    help="Property that the bot may declare; KEY=* any value.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="TEXT",
    help="Label that the bot may declare; * any [a limited bot: none].",
)
@click.option("--pool", metavar="NAME", help="The only pool the bot may serve [a limited bot: none].")
@click.option("--expires-in", callback=duration, metavar="DURATION", help="Lifetime: seconds, or 12h, 30d [never].")
@click.option("--note", metavar="TEXT", help="Who holds it, or what it is for; the list shows it.")
@as_json
@pass_installation
def create_token(
    installation: Installation,
    kind: str,
    instance: str | None,
    create: bool,
    bot: str | None,
    priority_ceiling: int | None,
    properties: tuple[str, ...],
    labels: tuple[str, ...],
    pool: str | None,
    expires_in: float | None,
    note: str | None,
    as_json: bool,
) -> None:
    """Make a token and print it. It cannot be shown again: only its digest is stored."""
    allowed = pairs(properties, option="--property") or None

    def make(connection: Connection) -> str:
        if instance is not None:
            instances.require(connection, instance, create=create, actor="local")
        return tokens.create(
            connection,
            kind,
            instance=instance,
            bot=bot,
            priority_ceiling=priority_ceiling,
            properties=allowed,
            labels=labels or None,
            pool=pool,
            expires_in=expires_in,
            note=note,
        )

    with installation.command_database("token") as database:
        token = database.run(make)
    if as_json:
        print_json({"id": tokens.parse(token), "kind": kind, "token": token})
    else:
        click.echo(token)


@token_group.command("list")
@as_json
@pass_installation
def list_tokens(installation: Installation, as_json: bool) -> None:
    """List all tokens, newest first, including expired and revoked ones."""
    with installation.command_database("token") as database:
        found = database.run(tokens.list_tokens)
    if as_json:
        print_json([asdict(token) for token in found])
        return
    columns = ("id", "kind", "instance", "bot", "ends", Column("created", leaves=1), Column("note", folds=True))
    table(
        columns,
        [
            (each.id, each.kind, each.instance, each.bot, _end(each), moment(each.created_at), each.note)
            for each in found
        ],
    )


def _end(token: tokens.StoredToken) -> str:
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is None:
        return "never"
    left = token.expires_at.timestamp() - clock.wall()
    return f"in {readable.duration(left)}" if left > 0 else "expired"


@token_group.command("revoke")
@click.argument("id")
@as_json
@pass_installation
def revoke_token(installation: Installation, id: str, as_json: bool) -> None:
    """Revoke a token for good. Gateways follow within seconds."""
    with installation.command_database("token") as database:
        database.run(lambda connection: tokens.revoke(connection, id))
    if as_json:
        print_json({"id": id, "revoked": True})
    else:
        click.echo(f"{id} is revoked")


def pairs(texts: Iterable[str], *, option: str) -> dict[str, list[str]]:
    """Parse `KEY=VALUE` texts; a key may come several times. Raises BadInput with the name of `option`."""
    found: dict[str, list[str]] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise BadInput(option, f"'{escaped(text, 80)}' is not KEY=VALUE")
        found.setdefault(key, []).append(value)
    return found


_COLOURS = {Verdict.OK: "green", Verdict.UNKNOWN: "cyan", Verdict.WARNING: "yellow", Verdict.BAD: "red"}


@db_group.command("doctor")
@as_json
@pass_installation
def examine_database(installation: Installation, as_json: bool) -> None:
    """Check what makes a pool slow or unsafe: wake-ups, old snapshots, indexes, vacuum, durability. Writes nothing.

    Exit 1 if a check is bad. Warnings, and checks that could not be made, are only shown.
    """
    try:
        with installation.command_database("doctor", ready=False) as database:
            checks = doctor.run_checks(database)
    except NotReady as error:
        directory = embedded.directory_of(installation.data)
        if installation.is_embedded and (left := server.room_mb(directory)) is not None:
            error.add_note(f"{left:,} MB are left for its directory, {directory}")
        raise
    bad = [check.name for check in checks if check.verdict is Verdict.BAD]
    if as_json:
        print_json({"ok": not bad, "checks": [asdict(check) for check in checks]})
    else:
        click.echo(installation.described)
        _print(checks)
    if bad:
        raise LeaseholdError(f"{len(bad)} of {len(checks)} checks are bad: {', '.join(bad)}")


def _print(checks: Sequence[Check]) -> None:
    from rich.text import Text

    width = max(len(check.name) for check in checks)
    for check in checks:
        print_line(Text(f"{check.verdict:<7}", _COLOURS[check.verdict]) + f"  {check.name:<{width}}  ", check.found)
        if check.remedy is not None:
            print_line(f"{'':7}  {'':{width}}  do: ", check.remedy)
