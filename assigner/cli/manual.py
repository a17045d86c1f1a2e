"""The command `help`: the pages of the documentation, a list of modules, and the help of a command."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path

import click
from leasehold.errors import BadInput
from leasehold.wire import escaped, suggestion

from assigner.cli import names
from assigner.cli.completion import Named

#: Where an installed package has the pages, and where the repository has them.
_INSTALLED, _REPOSITORY = Path(__file__).parent.parent / "pages", Path(__file__).parent.parent.parent
#: The page that the repository keeps outside of the others.
_FIRST = "readme"
#: The page that is made from the docstrings of the modules.
_MODULES = "modules"
_PACKAGES = ("schema", "assigner", "bots")


@cache
def topics() -> Mapping[str, Callable[[], str]]:
    """Return for each topic, by name, a function that reads its page."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _REPOSITORY / "ops" / "docs"
    first = folder / "readme.md" if _INSTALLED.is_dir() else _REPOSITORY / "README.md"
    files = {**{path.stem: path for path in folder.glob("*.md")}, _FIRST: first}
    pages: dict[str, Callable[[], str]] = {name: partial(path.read_text, "utf-8") for name, path in files.items()}
    return dict(sorted({**pages, _MODULES: modules}.items()))


def modules() -> str:
    """Make a page of all modules: the first sentence of the docstring of each, by folder."""
    page = ["# Modules: what each one holds\n"]
    for package in _PACKAGES:
        for folder in sorted({path.parent for path in (_REPOSITORY / package).rglob("*.py")}):
            paths = sorted(path for path in folder.glob("*.py") if path.stem != "__init__")
            if not paths or folder.name == "versions":
                continue
            marker = folder / "__init__.py"
            page.append(f"\n## {folder.relative_to(_REPOSITORY)}/\n")
            page += [f"{_first_sentence(marker)}\n"] * marker.is_file()
            page += [f"- `{path.name}`: {_first_sentence(path)}" for path in paths]
    return "\n".join(page) + "\n"


def _first_sentence(module: Path) -> str:
    """Read the docstring, with which every module begins, without the parser, which takes a second for all of them."""
    paragraph = " ".join(module.read_text(encoding="utf-8").split('"""', 2)[1].partition("\n\n")[0].split())
    return re.sub(r"(?<=\w\w[.)]) .*", "", paragraph)


@click.command("help")
@click.argument("topic", nargs=-1, type=Named(topics))
@click.pass_context
def help_command(context: click.Context, topic: tuple[str, ...]) -> None:
    """Show a page of the documentation, the help of a command, or the list of topics."""
    page = topics().get(topic[0]) if len(topic) == 1 else None
    if page is not None:
        _show(page())
    elif topic:
        _show_command(context.find_root(), topic)
    else:
        for name, read in topics().items():
            click.echo(f"{name:14}{read().partition(chr(10))[0].lstrip('# ')}")
        click.echo("\nleasehold help TOPIC shows a page, leasehold help COMMAND… what a command does")


def _show(text: str) -> None:
    """Write the page as it is, or on a terminal through a pager, with headings, tables and colours."""
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.capture() as captured:
        console.print(Markdown(text, hyperlinks=False))
    click.echo_via_pager(captured.get(), color=True)


def _show_command(root: click.Context, path: tuple[str, ...]) -> None:
    context, found = root, root.command
    for name in path:
        inner = found.get_command(context, name) if isinstance(found, click.Group) else None
        if inner is None:
            if (instead := names.instead(path)) is not None:
                raise BadInput("TOPIC", instead)
            commands = found.list_commands(context) if isinstance(found, click.Group) else []
            raise BadInput(
                "TOPIC",
                f"'{escaped(' '.join(path), 60)}' is neither a command nor one of the pages {', '.join(topics())}"
                + suggestion(name, [*topics(), *commands] if found is root.command else commands),
            )
        found, context = inner, click.Context(inner, info_name=name, parent=context)
    click.echo(found.get_help(context))
