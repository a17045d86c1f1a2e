"""What is made from the code: the man page of `leasehold`, the table of its commands, and the documented metrics.

`python -m ops.manual man` prints the page in the macros of man(7). `python -m ops.manual commands` writes the table of
commands, and `python -m ops.manual metrics` the rows of metrics in ops/docs/operations.md.
"""

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import iter_modules

import click
from prometheus_client import REGISTRY

import assigner.cli
import bots.cli
from assigner.cli import completion, operations
from assigner.cli.main import cli
from assigner.cli.manual import topics
from assigner.process import assign
from bots.cli.caller import caller_options
from bots.farm.metrics import DoorMetrics
from bots.gateway.metrics import GatewayMetrics

#: Packages whose modules define commands. Of the console one module does.
_COMMANDS = (assigner.cli, bots.cli)

#: The page with the table of metrics.
OPERATIONS = Path(__file__).parent / "docs/operations.md"

#: Sections after the commands. Exit codes and files are no part of a command's own help.
_EXITS = {
    "0": "Success.",
    "1": "A failure.",
    "2": "Bad input, or input that contradicts what is stored.",
    "3": "The database is not ready.",
    "130": "Ctrl-C.",
}
_FILES = {
    "./leasehold.toml, /etc/leasehold/leasehold.toml": "The configuration, if neither --config nor LEASEHOLD_CONFIG "
    "names one.",
    "~/.local/share/leasehold, for root /var/lib/leasehold": "The data directory, if neither --data nor "
    "LEASEHOLD_DATA names one.",
}


def roff(text: str) -> str:
    """Return a text in which no character is a request or an escape of roff. Characters beyond ASCII are named."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    text = "".join(each if ord(each) < 128 else f"\\[u{ord(each):04X}]" for each in text)
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in text.split("\n"))


def page() -> str:
    """Return the whole page."""
    root = click.Context(cli, info_name="leasehold")
    about = (cli.help or "").removeprefix("A ").rstrip(".")
    lines = [
        f'.TH LEASEHOLD 1 "" "leasehold {roff(version("leasehold"))}" "Leasehold"',
        ".SH NAME",
        f"leasehold \\- {roff(about)}",
        ".SH SYNOPSIS",
        ".B leasehold",
        "[OPTIONS] COMMAND [ARGUMENTS]",
        ".SH OPTIONS",
        *_options(cli, root),
        ".SH COMMANDS",
    ]
    for name in cli.list_commands(root):
        lines += _command(cli, root, name)
    for heading, items in {"EXIT STATUS": _EXITS, "FILES": _FILES}.items():
        lines.append(f".SH {heading}")
        for term, said in items.items():
            lines += [".TP", f".B {roff(term)}", roff(said)]
    known = ", ".join(topics())
    lines += [".SH SEE ALSO", roff(f"leasehold help TOPIC shows one of the pages {known}.")]
    return "\n".join(lines) + "\n"


def _command(group: click.Group, above: click.Context, name: str) -> Iterator[str]:
    found = group.get_command(above, name)
    assert found is not None, name
    context = click.Context(found, info_name=name, parent=above)
    usage = " ".join(found.collect_usage_pieces(context))
    yield f'.SS "{roff(context.command_path)} {roff(usage)}"'
    for paragraph in _paragraphs(found.help or ""):
        yield from paragraph
    yield from _options(found, context)
    if isinstance(found, click.Group):
        for each in found.list_commands(context):
            yield from _command(found, context, each)


def _paragraphs(text: str) -> Iterator[list[str]]:
    """Yield the paragraphs of a help text; those that click does not fill are not filled either."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in paragraph.split("\n")]
        if lines[0] == "\b":
            yield [".PP", ".nf", *(roff(line) for line in lines[1:]), ".fi"]
        else:
            yield [".PP", roff(" ".join(lines))]


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for each in command.get_params(context):
        record = each.get_help_record(context)
        if record is not None:
            yield from (".TP", f".B {roff(record[0])}", roff(" ".join(record[1].split())) or "\\&")


@click.group()
def program() -> None:
    """Make what is derived from the code."""


@program.command()
def man() -> None:
    """Print the man page."""
    sys.stdout.write(page())


@program.command()
def commands() -> None:
    """Write the table of all commands into the package."""
    rows = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in completion.table(cli, defined()).items())
    completion.TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


@program.command()
def metrics() -> None:
    """Write the rows of all metrics into the page on operations."""
    OPERATIONS.write_text(with_metrics(OPERATIONS.read_text()))


def with_metrics(page: str) -> str:
    """Return the page with a row for each metric, in the order of names, in place of the rows of metrics in it."""
    assert assign, "the module imports all others of the assigner that have metrics"
    own = [("assigner", each) for each in REGISTRY.collect() if each.name.startswith("leasehold_")]
    rows = []
    own += [("gateway", each) for each in GatewayMetrics().registry.collect()]
    own += [("farm door", each) for each in DoorMetrics().registry.collect()]
    for served_by, each in own:
        name = f"{each.name}_total" if each.type == "counter" else each.name
        rows.append(f"| `{name}` | {each.type} | {served_by} | {each.documentation} |")
    above, *others = re.split(r"^(?:\| `leasehold_.*\n)+", page, flags=re.MULTILINE)
    return above + "\n".join(sorted(rows)) + "\n" + "".join(others)


def defined() -> dict[str, tuple[str | None, click.Command]]:
    """Return each command, and where it is: `MODULE:ATTRIBUTE`; None for those of `main` and of declarations."""
    found: dict[str, tuple[str | None, click.Command]] = {name: (None, each) for name, each in cli.commands.items()}
    for name in operations.names():
        made = operations.command(name, caller_options)
        assert made is not None
        found[name] = (None, made)
    names = [f"{each.__name__}.{info.name}" for each in _COMMANDS for info in iter_modules(each.__path__)]
    for module in map(import_module, [*names, "bots.console.command", "bots.farm.command"]):
        here = {
            attribute: value
            for attribute, value in vars(module).items()
            if isinstance(value, click.Command) and getattr(value.callback, "__module__", None) == module.__name__
        }
        groups = [cli, *(value for value in here.values() if isinstance(value, click.Group))]
        below = {id(each) for group in groups for each in group.commands.values()}
        for attribute, command in here.items():
            if command is not cli and id(command) not in below:
                assert command.name is not None
                found[command.name] = (f"{module.__name__}:{attribute}", command)
    return found


if __name__ == "__main__":
    program()
