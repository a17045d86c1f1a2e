"""The table of all commands, and shell completion, which reads names, options and choices from it.

Every press of the Tab key starts the program, and so does every command. The commands of operators and of the pool's
processes import the modules of the database, which takes longer than a person waits for a completion. So the table
`commands.json` beside this module says which commands there are, where each is defined and what its help says.
`python -m ops.manual commands` writes it from the commands themselves, and a test compares it with them.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

#: What the scripts of click set when they ask for completions.
VARIABLE = "_LEASEHOLD_COMPLETE"
TABLE = Path(__file__).with_name("commands.json")

Entry = Mapping[str, Any]


class Named(click.ParamType[str]):
    """A word for which some names are offered; the command itself decides whether it takes others.

    names: returns the names; called when they are needed.
    """

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]]) -> None:
        self.names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        """Return the names that begin like what has been typed."""
        return [CompletionItem(name) for name in self.names() if name.startswith(incomplete)]


def is_asked() -> bool:
    """Return True if this process was started by a shell to complete a command line."""
    return VARIABLE in os.environ


def names() -> list[str]:
    """Return the names of all commands."""
    return [row.split('"')[1] for row in _text().splitlines()[1:-1]]


def entry(name: str) -> Entry | None:
    """Return what the table says of a command; None if there is none of this name.

    place: `MODULE:ATTRIBUTE` of the command; None = `main` defines it, or `operations.command` makes it.
    """
    after = _text().partition(f'\n"{name}": ')[2]
    # Only this row is parsed: parsing all of them would delay each start by more than a millisecond.
    return json.loads(after.partition("\n")[0].rstrip(",")) if after else None


def command(name: str) -> click.Command | None:
    """Return a command that only serves completion; None if there is none of this name."""
    found = entry(name)
    return None if found is None else _made(name, found)


@cache
def _text() -> str:
    return TABLE.read_text()


def _made(name: str, entry: Entry) -> click.Command:
    options: list[click.Parameter] = [
        click.Option(
            each["names"], help=each["help"], is_flag=each["flag"], multiple=each["many"], type=_type(each["kind"])
        )
        for each in entry["options"]
    ]
    arguments: list[click.Parameter] = [
        click.Argument([each["name"]], nargs=each["nargs"], type=_type(each["kind"])) for each in entry["arguments"]
    ]
    settings = {"allow_interspersed_args": entry["interspersed"]}
    if entry["commands"] is None:
        return click.Command(name, params=options + arguments, help=entry["help"], context_settings=settings)
    inner = {each: _made(each, below) for each, below in entry["commands"].items()}
    return click.Group(name, inner, params=options + arguments, help=entry["help"], context_settings=settings)


def _type(kind: str | list[str] | dict[str, list[str]] | None) -> "click.ParamType[Any] | None":
    """Return the type that completes like the one that `_kind` described."""
    if isinstance(kind, dict):
        return Named(partial(list, kind["names"]))
    if isinstance(kind, list):
        return click.Choice(kind)
    return click.Path(file_okay=kind == "file") if kind else None


def table(root: click.Group, defined: Mapping[str, tuple[str | None, click.Command]]) -> dict[str, Any]:
    """Return the table of all commands. defined: by name, the place of the command's function, and the command."""
    above = click.Context(root, info_name="leasehold")
    return {
        name: {"place": place, **_entry(command, above, name)} for name, (place, command) in sorted(defined.items())
    }


def _entry(found: click.Command, above: click.Context, name: str) -> dict[str, Any]:
    context = click.Context(found, info_name=name, parent=above)
    options = [each for each in found.params if isinstance(each, click.Option) and not each.hidden]
    arguments = [each for each in found.params if isinstance(each, click.Argument)]
    below = None
    if isinstance(found, click.Group):
        inner = {each: found.get_command(context, each) for each in found.list_commands(context)}
        below = {each: _entry(made, context, each) for each, made in inner.items() if made is not None}
    return {
        "help": found.get_short_help_str(300),
        "interspersed": found.allow_interspersed_args,
        "options": [
            {
                "names": [*each.opts, *each.secondary_opts],
                "help": (each.help or "").partition("\n")[0],
                "flag": each.is_flag,
                "many": each.multiple,
                "kind": _kind(each.type),
            }
            for each in options
        ],
        "arguments": [{"name": each.name, "nargs": each.nargs, "kind": _kind(each.type)} for each in arguments],
        "commands": below,
    }


def _kind(kind: "click.ParamType[Any]") -> str | list[str] | dict[str, list[str]] | None:
    match kind:
        case Named():
            return {"names": sorted(kind.names())}
        case click.Choice():
            return [str(choice) for choice in kind.choices]
        case click.Path():
            return "file" if kind.file_okay else "directory"
        case click.File():
            return "file"
        case _:
            return None


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script by which a shell completes commands.

    \b
    eval "$(leasehold completion bash)"        # in ~/.bashrc
    eval "$(leasehold completion zsh)"         # in ~/.zshrc, after compinit
    leasehold completion fish > ~/.config/fish/completions/leasehold.fish
    """
    found = get_completion_class(shell)
    assert found is not None, shell
    click.echo(found(context.find_root().command, {}, "leasehold", VARIABLE).source())
