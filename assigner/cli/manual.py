"""The command `help`: the pages of the documentation, and the help of a command."""

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import click
from leasehold.errors import BadInput
from leasehold.wire import escaped, suggestion

from assigner.cli.completion import Named

#: Where an installed package has the pages, and where the repository has them.
_INSTALLED, _REPOSITORY = Path(__file__).parent.parent / "pages", Path(__file__).parent.parent.parent
#: The page that the repository keeps outside of the others.
_FIRST = "readme"


@cache
def topics() -> Mapping[str, Path]:
    """Return the page of each topic, by name."""
    folder = _INSTALLED if _INSTALLED.is_dir() else _REPOSITORY / "ops" / "docs"
    first = folder / "readme.md" if _INSTALLED.is_dir() else _REPOSITORY / "README.md"
    pages = {path.stem: path for path in sorted(folder.glob("*.md"))} | {_FIRST: first}
    return dict(sorted(pages.items()))


@click.command("help")
@click.argument("topic", nargs=-1, type=Named(topics))
@click.pass_context
def help_command(context: click.Context, topic: tuple[str, ...]) -> None:
    """Show a page of the documentation, the help of a command, or the list of topics."""
    page = topics().get(topic[0]) if len(topic) == 1 else None
    if page is not None:
        _show(page.read_text())
    elif topic:
        _show_command(context.find_root(), topic)
    else:
        for name, path in topics().items():
            click.echo(f"{name:14}{path.read_text().partition(chr(10))[0].lstrip('# ')}")
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
            commands = found.list_commands(context) if isinstance(found, click.Group) else []
            raise BadInput(
                "TOPIC",
                f"'{escaped(' '.join(path), 60)}' is neither a command nor one of the pages {', '.join(topics())}"
                + suggestion(name, [*topics(), *commands] if found is root.command else commands),
            )
        found, context = inner, click.Context(inner, info_name=name, parent=context)
    click.echo(found.get_help(context))
