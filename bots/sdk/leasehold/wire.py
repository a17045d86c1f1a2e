"""What every gateway takes: bounds, names, time zones, cron expressions and JSON values; text that is safe to show."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from leasehold.errors import BadInput

if TYPE_CHECKING:
    from datetime import datetime
    from zoneinfo import ZoneInfo

#: Values and keys of one JSON document: a hundred for each job of the largest batch. Doubling it doubles the memory and
#: time that one document may take.
MAX_JSON_NODES = 1_000_000
#: Lists and objects inside each other in one JSON document.
MAX_JSON_DEPTH = 64
#: The exit code by which a command asks to be run again (EX_TEMPFAIL of sysexits.h), the most seconds until a job runs,
#: for the first time or again, and the most times that one job asks.
AGAIN, MAX_DELAY, MAX_AGAINS = 75, 31_536_000.0, 1000
#: How a bot's reason begins for a result that was left and could not be stored.
NO_RESULT = "no result is stored, because"
#: Bytes of JSON text of a job's result, and of its checkpoint.
MAX_RESULT_BYTES = MAX_CHECKPOINT_BYTES = 64 * 1024
#: The most characters of the text of a job's progress, and bytes of the file in which a command leaves it.
MAX_PROGRESS_TEXT, MAX_PROGRESS_BYTES = 200, 1536
#: What keys of submits begin with that a client has drawn for its own repeats. They are kept for an hour.
AUTOMATIC = "auto:"
#: Bytes of the key by which a job joins an unfinished one.
MAX_DEDUP_KEY_BYTES = 200
#: Bytes that every gateway accepts in one request, however it is configured. The largest call of a bot fits: the ends
#: of 10,000 leases, and as much output as one attempt may have.
LEAST_BODY = 16 * 1024 * 1024
#: Jobs in one request.
MAX_BATCH = 10_000
#: Jobs in one page of a list, and ids in one request.
MAX_LIST = 1000
#: Short names of jobs in one request: each may read the ids of more than a minute from the index.
MAX_NAMES = 50
#: Bytes of a cron expression, and its fields.
MAX_CRON, CRON_FIELDS = 200, "minute, hour, day of the month, month, day of the week"
#: What a schedule does after an outage about the ticks that were missed.
CatchUp = Literal["skip", "all", "none"]
#: What it does about a tick while the previous job has not ended.
Overlap = Literal["allow", "skip"]
#: The console script that runs one task, and the property of bots that can run the tasks of an app.
COMMAND, PROPERTY = "leasehold-task", "app"
#: The form of names, and what is said of it.
NAME, NAME_FORM = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}"), "use a-z, 0-9, '.', '_', '-', at most 63"

_PLAIN = (bool, int, type(None))
#: What a text of JSON has for a NUL character, if no backslash stands before it.
_NUL = "\\u0000"


def count_nodes(document: str) -> int:
    """Number of values and keys of a JSON document, counted by its punctuation without decoding.

    An empty list or object counts twice. For a text that is no JSON, the number is at least as large as the number of
    objects that a decoder would make before it noticed.
    """
    plain = document.replace("\\\\", "").replace('\\"', "")
    strings = plain.count('"') // 2
    if strings > MAX_JSON_NODES:
        return strings
    outside = "".join(plain.split('"')[::2])
    return 1 + sum(map(outside.count, ",:[{"))


def check_name(field: str, value: str) -> str:
    """Return `value` if it is a legal name (`[a-z0-9][a-z0-9._-]{0,62}`); raise BadInput naming `field`."""
    if not NAME.fullmatch(value):
        raise BadInput(field, f"'{escaped(value, 80)}' is not a name: {NAME_FORM}")
    return value


@cache
def zone_names() -> frozenset[str]:
    """The names of all time zones. Empty on a machine without any, where the package tzdata is missing."""
    from zoneinfo import available_timezones  # most programs name no zone

    return frozenset(available_timezones())


def load_zone(name: str) -> "ZoneInfo":
    """The time zone with this name, such as `UTC` or `Europe/Berlin`. Raises ValueError if there is none."""
    from zoneinfo import ZoneInfo

    if name not in zone_names():
        # Zones without a place, such as EST, are left out: nearly every misspelt word resembles one of them.
        meant = suggestion(name[:60], [known for known in zone_names() if "/" in known])
        raise ValueError(f"'{name[:60]}' is not a time zone: use a name such as 'UTC' or 'Europe/Berlin'{meant}")
    try:
        return ZoneInfo(name)
    # Its file was removed or replaced after the names were read.
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(f"time zone '{name}' cannot be read ({type(error).__name__})") from None


def check_cron(field: str, value: str) -> str:
    """Return a cron expression with single spaces. Raises BadInput naming `field` unless it has five valid fields."""
    from cronsim import CronSimError  # most programs have no schedule

    if len(value.encode(errors="replace")) > MAX_CRON:
        raise BadInput(field, f"is longer than {MAX_CRON} bytes")
    parts = value.split()
    if len(parts) != 5:
        has = f"has {len(parts)} field{'' if len(parts) == 1 else 's'}"
        raise BadInput(field, f"'{escaped(value, 80)}' {has}, not the five fields {CRON_FIELDS}, such as 0 3 * * *")
    expression = " ".join(parts)
    try:
        _ticks(expression)
    # Of a step after `L` or `#`, cronsim finds with an assertion or a comparison that it means nothing.
    except (CronSimError, AssertionError, TypeError) as error:
        said = f": {str(error)[:1].lower()}{str(error)[1:]}" if isinstance(error, CronSimError) else ""
        said += ", which none of its months has" if _is_of_no_month(parts) else ""
        raise BadInput(field, f"'{escaped(value, 80)}' is not a cron expression{said}") from None
    return expression


def _is_of_no_month(parts: list[str]) -> bool:
    """Return True if a refused cron expression would be one in any month, such as that for the 30th of February."""
    from cronsim import CronSimError

    try:
        _ticks(" ".join([*parts[:3], "*", parts[4]]))
        _ticks(f"0 0 1 {parts[3]} *")
    except (CronSimError, AssertionError, TypeError):
        return False
    return True


def has_ticks(expression: str) -> bool:
    """Return False if a checked cron expression has no tick within 50 years, such as one for the 30th of February."""
    return next(_ticks(expression), None) is not None


def _ticks(expression: str) -> "Iterator[datetime]":
    from datetime import UTC, datetime

    from cronsim import CronSim

    # After this time, an expression that has ticks at all has one within 50 years.
    return CronSim(expression, datetime(2000, 1, 1, tzinfo=UTC))


def check_place(place: str) -> tuple[str, str]:
    """Return the module and the attribute that `MODULE:POOL` names. Raises BadInput for any other text."""
    module, _, attribute = place.partition(":")
    shown = escaped(place, 80)
    if "/" in module or module.endswith(".py"):
        raise BadInput("app", f"'{shown}' names a file: write MODULE:POOL, such as shop:pool for `pool` of shop.py")
    if not all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        raise BadInput("app", f"'{shown}' is not of the form MODULE:POOL, such as shop:pool for `pool` of shop.py")
    return module, attribute


class Serialiser(Protocol):
    """Makes JSON values of arguments and results of tasks, and the other way round.

    A pool uses the same one where tasks are deferred and where they run.
    """

    def encode(self, value: Any) -> Any:
        """Return `value` as a JSON value. Raises TypeError or ValueError, with the reason, if it cannot be one."""

    def decode(self, found: Any) -> Any:
        """Return the value of which `encode` made this JSON value."""


class JsonSerialiser:
    """Takes JSON values as they are and refuses all others. A tuple comes back as a list."""

    def encode(self, value: Any) -> Any:
        return value

    def decode(self, found: Any) -> Any:
        return found


#: Returns the JSON text of a value that was checked. Letters stand in it as they are: limits count bytes of UTF-8.
json_text = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def written(document: Any) -> str:
    """Return the JSON text of a request. Raises BadInput with the place of a value that no pool holds, and why."""
    try:
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
        is_held = _NUL not in text or _NUL not in text.replace("\\\\", "?")
    except (TypeError, ValueError, RecursionError):
        is_held = False
    if not is_held:
        raise _unheld(document, ()) or BadInput("request", "is no JSON") from None
    return text


def _unheld(value: Any, place: tuple[str, ...]) -> BadInput | None:
    """Return the refusal of the first value or key that is no JSON, or that the pool's database cannot hold."""
    where = ".".join(place) or "request"
    if isinstance(value, (dict, list, tuple)) and len(place) < MAX_JSON_DEPTH:
        for key in value if isinstance(value, dict) else ():
            # Python's writer makes texts of numbers, of truth values and of None.
            if not (isinstance(key, (str, int)) or key is None or (isinstance(key, float) and math.isfinite(key))):
                return BadInput(where, f"has a key of type '{type(key).__name__}', not a text")
            try:
                check_json(key)
            except ValueError as error:
                return BadInput(where, f"has a key that {error}")
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (_unheld(each, (*place, escaped(str(key), 60))) for key, each in pairs)), None)
    try:
        check_json(value, depth=len(place))
        if isinstance(value, int):
            _check_digits(value)
    except ValueError as error:
        is_json = isinstance(value, (str, float, int, dict, list, tuple))
        said = str(error) if is_json else f"is a '{type(value).__name__}', and JSON has none"
        return BadInput(where, said)
    return None


def waited(timeout: float | None) -> float:
    """Return the seconds that a wait may take, infinity for None. Raises BadInput for what is no number."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or math.isnan(timeout):
        raise BadInput("timeout", f"is a number of seconds, not {escaped(timeout, 60)}")
    return timeout


def check_json(value: Any, *, depth: int = 0) -> None:
    """Raise ValueError, with the reason, unless the value is JSON that the pool's database can hold."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a number of JSON")
    elif not isinstance(value, (list, tuple, dict, int)):
        other = "annotate what takes it, or see the serialiser of the pool"
        raise ValueError(f"a value of type '{type(value).__name__}' is not JSON; {other}")
    elif depth == MAX_JSON_DEPTH:
        raise ValueError(f"is nested more than {MAX_JSON_DEPTH} levels deep")
    elif isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"a key of type '{type(key).__name__}' would come back as a text")
            _check_text(key)
            check_json(each, depth=depth + 1)
    elif not isinstance(value, int):
        for each in value:
            check_json(each, depth=depth + 1)


def _check_digits(number: int) -> None:
    """Refuse an integer of more digits than Python makes a text of."""
    try:
        str(number)
    except ValueError:
        raise ValueError("is an integer of too many digits") from None


def _check_text(text: str) -> None:
    """Refuse what a text of PostgreSQL cannot hold."""
    if "\0" in text:
        raise ValueError("holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair") from None


def escaped(value: object, limit: int = 200) -> str:
    """A value for a message: unprintable characters are escaped, and it is cut at `limit` characters."""
    return printable(value if isinstance(value, str) else repr(value), limit)


def printable(text: str, limit: int | None = None) -> str:
    """Text that is safe on a terminal: unprintable characters are escaped, and it is cut at `limit` characters."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )
    return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"


class Hinting:
    """A class that tells what to use in the place of an attribute, or of the operator `|`, of other libraries."""

    #: What it is, and name in other libraries, or `|` → what to use here.
    _hints: ClassVar[tuple[str, Mapping[str, str]]] = ("", {})
    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            what, hints = self._hints
            if name in hints:
                raise AttributeError(f"{what} has no '{name}': {hints[name]}")
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self)

        def __or__(self, other: Any) -> Any:
            what, hints = self._hints
            if "|" in hints:
                raise TypeError(f"{what} has no '|': {hints['|']}")
            return NotImplemented


def meant(wrong: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar; None if none is similar."""
    names = tuple(known)
    # Nothing three times as long is similar, and difflib would read all of a text of megabytes to tell so.
    return None if len(wrong) > 3 * max(map(len, names), default=0) else _most_similar(wrong, names)


@lru_cache(maxsize=64)  # all lines of a file may have the same mistake
def _most_similar(wrong: str, names: tuple[str, ...]) -> str | None:
    import difflib  # most programs misspell nothing

    return next(iter(difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)), None)


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """The text `; did you mean 'x'?` with the most similar known name; empty if none is similar."""
    close = meant(wrong, known)
    return "" if close is None else f"; did you mean '{close}'?"


def withheld(said: str, names: Iterable[str]) -> str:
    """The text that tells how tasks come to see a variable that `said` names, of the `names` of those that they do not.

    Empty if it names none. Those of the program itself stay unseen, because they may hold a token.
    """
    words = set(re.findall(r"\w+", said))
    found = sorted(each for each in names if each in words and not each.startswith("LEASEHOLD_"))
    if not found:
        return ""
    allow = ", ".join(f'"{name}"' for name in ("PATH", *found))
    return (
        "; tasks see the variables of bot.env_allow only: give it those that they see now and "
        f"{' and '.join(found)}, such as LEASEHOLD_BOT_ENV_ALLOW='[{allow}]'"
    )
