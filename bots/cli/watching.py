"""`--watch`: what a command shows, shown again every few seconds until Ctrl-C, also while no gateway answers."""

import io
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from leasehold.client import Client
from leasehold.errors import LeaseholdError, NotReady
from leasehold.wire import escaped

from bots.cli.caller import Caller, whole_id
from schema import clock, readable
from schema.readable import tell

R = TypeVar("R")

#: Seconds between two looks, if none are given, and the least.
EVERY, LEAST = 2.0, 0.1
#: Seconds for which an unanswered call of one look is repeated. The next look tries again.
PATIENCE = 1.0
#: The types of errors that another look may not meet again; their subclasses are answers that stay the same.
_PASSING = (LeaseholdError, NotReady)


class _Seconds(click.FloatRange):
    """A number of seconds. The option takes the next argument for it, so that the message says how to avoid that."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            is_number = not math.isnan(float(value))
        except ValueError:
            is_number = False
        if not is_number:
            self.fail(f"'{escaped(str(value), 60)}' is no number of seconds: put --watch last", param, ctx)
        return float(super().convert(value, param, ctx))


def watch_option(command: Callable[..., R]) -> Callable[..., R]:
    """Add `--watch [SECONDS]`, which the command receives as `watch`: None = show once."""
    return click.option(
        "--watch",
        type=_Seconds(LEAST, 86400),
        is_flag=False,
        flag_value=EVERY,
        metavar="[SECONDS]",
        help=f"Show it again every SECONDS, {EVERY:g} if none are given, until Ctrl-C.",
    )(command)


class Named:
    """A job by what a person calls it. The first look finds its whole id, which the later ones keep to.

    A word such as @last may stand for another one by then.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._whole: str | None = None

    def of(self, client: Client) -> str:
        """Return its whole id."""
        if self._whole is None:
            self._whole = whole_id(client, self._name)
        return self._whole


def shown(caller: Caller, watch: float | None, show: Callable[[Client], None]) -> None:
    """Call `show`, which reads and prints, once or every `watch` seconds until Ctrl-C.

    On a terminal the same place is drawn again. Elsewhere each time is a paragraph of its own below a line with the
    time, or with --json a line. While no gateway answers, that is said with the latest answer, and tried again. Raises
    the errors of the first look, and later those that waiting does not change.
    """
    if watch is None:
        with caller.client() as client:
            show(client)
        return
    with caller.client(patience=PATIENCE) as client:
        draw = _as_json if caller.json else _on_terminal if sys.stdout.isatty() else _below_each_other
        try:
            draw(watch, lambda: show(client))
        except KeyboardInterrupt:
            raise click.Abort from None


def _look(show: Callable[[], None], *, is_first: bool) -> str | None:
    """Call `show`; return why no gateway answered, or None."""
    try:
        show()
    except LeaseholdError as error:
        if is_first or type(error) not in _PASSING:
            raise
        return str(error)
    return None


def _below_each_other(every: float, show: Callable[[], None]) -> None:
    def with_time() -> None:
        picture, _ = _captured(show, colours=False)
        click.echo(f"--- {_now()}\n{picture}", nl=False)

    _as_json(every, with_time)


def _as_json(every: float, show: Callable[[], None]) -> None:
    is_first = True
    while True:
        problem = _look(show, is_first=is_first)
        if problem is not None:
            tell(f"{_now()}: {problem}; trying again")
        sys.stdout.flush()
        is_first = False
        clock.sleep(every)


def _now() -> str:
    return readable.moment(datetime.fromtimestamp(clock.wall(), UTC).replace(microsecond=0))


def _on_terminal(every: float, show: Callable[[], None]) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    problem: str | None = None
    picture, _ = _captured(lambda: _look(show, is_first=True))
    read_at = _now()
    with Live(console=Console(highlight=False, markup=False), auto_refresh=False) as live:
        while True:
            heading = Text(f"{read_at}, every {readable.duration(every)}; Ctrl-C ends", style="dim")
            if problem is not None:
                heading = Text(f"{_now()}: {problem}; this is from {read_at}", style="red")
            shown = Text.from_ansi(picture, overflow="fold")
            live.update(Group(heading, shown), refresh=True)
            clock.sleep(every)
            drawn, problem = _captured(lambda: _look(show, is_first=False))
            if problem is None:
                picture, read_at = drawn, _now()


class _Coloured(io.StringIO):
    """Text that is printed as on a terminal, with colours."""

    def isatty(self) -> bool:
        return True


def _captured(call: Callable[[], R], *, colours: bool = True) -> tuple[str, R]:
    """Return what `call` prints on standard output, and what it returns."""
    into = _Coloured() if colours else io.StringIO()
    with redirect_stdout(into), readable.on_a_screen():
        found = call()
    return into.getvalue(), found
