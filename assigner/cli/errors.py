"""Running a command: errors become one sentence on standard error and an exit code, whatever the three streams are."""

import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import click
from leasehold import wire
from leasehold.errors import BadInput, Conflict, LeaseholdError, NotFound, NotReady, QueueFull, Unauthorised

from assigner.cli.names import NEEDLESS_OPTIONS, RENAMED_OPTIONS, SUBMIT_OPTIONS
from schema.readable import tell


class StandardError(io.FileIO):
    """Standard error of the program: what cannot be written there is lost, and what the process does goes on.

    On a full disk, or once its terminal is gone, a line of the log would otherwise end whatever has logged it: a bot
    with its jobs, or a loop of an assigner. The next line that can be written comes after the number of those lost.
    """

    _lost = 0

    def write(self, data: Any, /) -> int:
        try:
            if self._lost and super().write(f"\nlines that could not be written here: {self._lost:,}\n".encode()):
                self._lost = 0
            written = super().write(data)
        except OSError:
            written = None
        if written is None:
            # Also if it would have to be waited for, because somebody has made the stream so.
            self._lost += bytes(data).count(b"\n")
            return len(data)
        return written


def open_streams() -> None:
    """Make the three standard streams such that no command has to look what they are.

    One that the caller has closed leads nowhere, also for programs that are started: otherwise the next file or
    connection would be opened as it, and written to. What the encoding of the locale does not have is printed as its
    number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    encoding = sys.stderr.encoding if sys.stderr else sys.stdout.encoding
    raw = StandardError(2, "w", closefd=False)
    raw.name = "<stderr>"
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run(command: click.Command, arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code.

    0: success, unless the command returns another code. 1: a failure. 2: bad input, or input that contradicts what is
    stored. 3: the database is not ready. 130: Ctrl-C.
    """
    try:
        code = command.main(args=list(arguments), prog_name="leasehold", standalone_mode=False)
        sys.stdout.flush()
        return code if type(code) is int else 0
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        return _complain(_click_message(error), code=2)
    except QueueFull as error:
        return _complain(_told(error), code=1)
    except BadInput as error:
        _complain(_told(error), code=2)
        for other in error.others:
            _complain(str(other), code=2)
        if error.more:
            tell(f"and {error.more:,} more")
        return 2
    except (NotFound, Conflict, Unauthorised) as error:
        return _complain(_told(error), code=2)
    except NotReady as error:
        return _complain(_told(error), code=3)
    except LeaseholdError as error:
        return _complain(_told(error), code=1)
    except BrokenPipeError:
        # Without this, the interpreter reports the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename else str(error), code=1)


def _told(error: LeaseholdError) -> str:
    """Return the error with its notes, such as what was done before it."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def _click_message(error: click.ClickException) -> str:
    """Return click's message in the form `field: reason`."""
    if isinstance(error, click.NoSuchOption):
        return _no_such_option(error)
    if isinstance(error, click.UsageError) and (found := _TOO_MANY.search(error.message)):
        return _too_many(found[1], error.ctx)
    if isinstance(error, click.BadOptionUsage):
        told = "takes no value" if error.message.endswith("does not take a value.") else "needs a value"
        return f"{error.option_name}: {told}"
    if not isinstance(error, click.BadParameter) or error.param is None:
        return error.format_message()
    option = error.param
    field = option.opts[-1] if isinstance(option, click.Option) else option.human_readable_name
    if isinstance(error, click.MissingParameter):
        return f"{field}: is missing{_example(error.ctx) or _usage_of_several(error.ctx)}"
    return f"{field}: {_told_of_value(error.message, option)}"


def _told_of_bound(value: float, kind: click.IntRange | click.FloatRange) -> str:
    """Name the bound that a value passes, in the words of settings and requests."""
    least, most = kind.min, kind.max
    if least is not None and (value < least or (value == least and kind.min_open)):
        return f"must be greater than {'' if kind.min_open else 'or equal to '}{least:.15g}"
    return f"must be less than {'' if kind.max_open else 'or equal to '}{most:.15g}"


#: How click says that there are more arguments than the command takes, and that a value is none of its type.
_TOO_MANY = re.compile(r"^Got unexpected extra arguments? \((.*)\)$", re.DOTALL)
_OUT_OF_RANGE = re.compile(r"^(\S+) is not in the range ")
_OF_TYPE = re.compile(r" is not a valid (integer|float)( range)?\.$")


def _no_such_option(error: click.NoSuchOption) -> str:
    """Say that there is no such option, with the one that is alike; the dashes, which all have, do not count."""
    given, command = error.option_name, error.ctx and error.ctx.command
    if given in RENAMED_OPTIONS:
        return f"{given}: {RENAMED_OPTIONS[given]}"
    path = error.ctx.command_path.partition(" ")[2] if error.ctx else ""
    if (path, given) in NEEDLESS_OPTIONS:
        return f"{given}: {NEEDLESS_OPTIONS[path, given]}"
    if path == "submit" and given in SUBMIT_OPTIONS:
        return f"{given}: {SUBMIT_OPTIONS[given]}"
    root = error.ctx and error.ctx.find_root()
    if path and root and any(given in each.opts for each in root.command.params):
        return f"{given}: goes before the command, as in 'leasehold {given} … {path}'"
    options = [each for each in (command.params if command else ()) if isinstance(each, click.Option)]
    known = {name.lstrip("-"): name for each in options for name in each.opts if name.startswith("--")}
    begun = [name for name in known if name.startswith(given.lstrip("-")) and len(given.lstrip("-")) > 1]
    alike = begun[0] if len(begun) == 1 else wire.meant(given.lstrip("-"), known)
    hint = "" if alike is None else f"; did you mean '{known[alike]}'?"
    return f"there is no option '{wire.escaped(given, 60)}'{hint}"


def _too_many(words: str, context: click.Context | None) -> str:
    told = f"'{wire.escaped(words, 80)}' is more than this command takes"
    if context is None:
        return told
    if context.command.name == "list" and context.parent is context.find_root():
        return f"{told}: filters are options, such as --label build --state failed"
    return f"{told}: {usage(context)}"


def usage(context: click.Context) -> str:
    """Return how the command is called, on one line."""
    return f"{context.command_path} {' '.join(context.command.collect_usage_pieces(context))}"


def _told_of_value(message: str, option: click.Parameter) -> str:
    """Return click's sentence on a value, in words that name no type of a program."""
    if isinstance(option.type, click.IntRange | click.FloatRange) and (found := _OUT_OF_RANGE.match(message)):
        return _told_of_bound(float(found[1]), option.type)
    if isinstance(option.type, click.Choice):
        given, *choices = re.findall(r"'((?:[^'\\]|\\.)*)'", message)
        message = message.removesuffix(".") + wire.suggestion(given, choices)
    return _OF_TYPE.sub(lambda found: f" is not a {'whole ' if found[1] == 'integer' else ''}number", message)


def _example(context: click.Context | None) -> str:
    """Return the first example of the command's help as a clause; empty if it shows none."""
    told = ((context and context.command.help) or "").splitlines()
    found = next((line.strip() for line in told if line.strip().startswith("leasehold ")), None)
    return "" if found is None else f", as in: `{found}`"


def _usage_of_several(context: click.Context | None) -> str:
    """Return the usage of a command with several arguments as a clause: which of them is which has to be known."""
    arguments = [each for each in (context.command.params if context else ()) if isinstance(each, click.Argument)]
    return f": {usage(context)}" if context and len(arguments) > 1 else ""


def _complain(text: str, *, code: int) -> int:
    """Print the error as one sentence. Help, which click raises if no command is given, is printed as it is."""
    is_help = text.startswith("Usage:")
    if is_help:
        click.echo(text, err=True)
    else:
        tell("error: " + " ".join(text.split("\n")).strip())
    return code
