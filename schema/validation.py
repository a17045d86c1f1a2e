"""Limits and checks of names, text, properties and JSON, made before a value reaches PostgreSQL.

It does not import pydantic, which takes a third of the time of a command that only calls a gateway.
`schema/fields.py` has types of models' fields that make these checks.
"""

import errno
import json
import math
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal, Never, get_args

from leasehold import wire
from leasehold.errors import BadInput
from leasehold.wire import MAX_JSON_DEPTH, MAX_JSON_NODES, count_nodes, escaped
from leasehold.wire import NAME as NAME
from leasehold.wire import check_name as check_name
from leasehold.wire import load_zone as load_zone

from schema import clock

PRIORITY_MIN, PRIORITY_MAX = -1000, 1000
MAX_PAYLOAD_BYTES = 256 * 1024
MAX_PROPERTIES = 64
MAX_PROPERTY_BYTES = 1024
MAX_LABEL = 64
#: Earlier names of fields and settings: what a refusal says of them.
RENAMED = {"credit_weight": "is now `weight`", "urgency": "is now `priority`, which is 100 - urgency"}
#: Metadata of a job: most keys, form of a key, bytes of a value.
MAX_METADATA = 16
METADATA_KEY = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
MAX_METADATA_BYTES = 256
#: The key whose value is the context of a trace, and the form of that value (https://www.w3.org/TR/trace-context/):
#: neither id is all zeros, no version is ff, and versions after 00 may add to it.
TRACEPARENT = "traceparent"
_TRACE = "-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
TRACE_CONTEXT = re.compile(f"00{_TRACE}|(?!00|ff)[0-9a-f]{{2}}{_TRACE}(-[!-~]*)?")
#: Bytes of the reason that an operator gives for an act.
MAX_REASON = 500
#: Keys of one JSON object.
MAX_JSON_KEYS = 10_000
MAX_UNITS = 1_000_000
MAX_ATTEMPTS = 5
#: Times that the bot of a running job may be lost, unless its request says otherwise, and times that a job may ask to
#: be run again.
MAX_KILLS, MAX_AGAINS = 3, wire.MAX_AGAINS
#: Lost attempts of one job that are not counted because its bots were only cut off.
MAX_FORGIVEN = 10
#: Bytes of output kept for one attempt of a job; the agent keeps as many, half of them the last ones.
MAX_OUTPUT_BYTES = 1024 * 1024
#: Bytes of JSON text of a job's result, and of its checkpoint.
MAX_RESULT_BYTES, MAX_CHECKPOINT_BYTES = wire.MAX_RESULT_BYTES, wire.MAX_CHECKPOINT_BYTES

#: The property of bots that run actions, and its value; and what the deduplication keys of actions begin with. Only the
#: farm door may say them in a request. Results of actions are kept for everybody who asks for the same action, so a job
#: that could pass for one of the door's would decide what others get.
FARM, OF_FARM = "leasehold.farm", "action"
ACTION_KEY = "a:"
#: The program of the job that runs an action. It is installed beside `leasehold`.
RUN_ACTION = "leasehold-action"

#: The longest of all time-outs, delays and ages that anybody may give, in seconds.
YEAR = 31_536_000.0
#: A duration: one number of seconds, or numbers with their units, as `1h30m`.
_DURATION = re.compile(r"\d*\.?\d+(e-\d+)?|(\d*\.?\d+\s*(min|[smhd])\s*)+", re.ASCII)
_PART = re.compile(r"([\d.]+)\s*(min|[smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
#: A time with an offset, RFC 3339 without leap seconds.
MOMENT = re.compile(
    r"[12]\d{3}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[T ]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?"
    r"(Z|[+-](0\d|1[0-4]):[0-5]\d)",
    re.ASCII,
)
#: Resources of a bot besides its units: thousandths of cores and GPUs, MiB of memory and disk, whole GPUs.
ResourceName = Literal["cpu_milli", "memory_mib", "disk_mib", "gpu_milli", "gpus"]
#: In the order in which `explain` names what is missing.
RESOURCES: tuple[ResourceName, ...] = get_args(ResourceName)
#: The thousandths of one GPU, and the most GPUs of one bot.
WHOLE_GPU, MAX_GPUS = 1000, 64
#: The largest amount of one resource.
MAX_RESOURCE = 1_000_000_000_000
#: Requirement or capability sets: property → its values, both sorted, no duplicates.
Properties = dict[str, list[str]]


def check_text(field: str, value: str, limit: int) -> str:
    """Return `value` if PostgreSQL can store it as text of at most `limit` bytes; raise BadInput otherwise."""
    if "\x00" in value:
        raise BadInput(field, "holds a NUL character")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadInput(field, "holds a lone surrogate: no UTF-8 text has one") from None
    if size > limit:
        raise BadInput(field, f"is {size} bytes long, at most {limit} are allowed")
    return value


def read_duration(field: str, text: str) -> float:
    """Return the seconds of a duration such as `90m`, `1h30m`, `2 d`; a number alone is seconds. Raises BadInput."""
    found = math.inf
    if _DURATION.fullmatch(text):
        parts = _PART.findall(text)
        found = sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(text)
    if not math.isfinite(found):
        raise BadInput(field, f"'{escaped(text, 60)}' is not a duration, such as 90m, 1h30m or 45 (seconds)")
    return found


def check_metadata_key(field: str, key: str) -> str:
    """Return `key` if it may be a key of metadata; raise BadInput naming `field`."""
    if not METADATA_KEY.fullmatch(key):
        raise BadInput(field, f"'{escaped(key, 80)}' is not a key: use A-Z, a-z, 0-9 and _.:/-, at most 64")
    return key


def check_metadata(field: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return a job's metadata if they may be stored; raise BadInput naming `field`, or the key of a bad value."""
    if len(given) > MAX_METADATA:
        raise BadInput(field, f"has {len(given)} keys, at most {MAX_METADATA} are allowed")
    for key, value in given.items():
        check_metadata_key(field, key)
        check_text(f"{field}.{key}", value, MAX_METADATA_BYTES)
    if TRACEPARENT in given and not TRACE_CONTEXT.fullmatch(given[TRACEPARENT]):
        raise BadInput(f"{field}.{TRACEPARENT}", "is not a traceparent as W3C Trace Context defines it")
    return dict(given)


def normal_moment(given: str) -> str:
    """Return a time with an offset in the form in which requests keep it: in UTC, to the microsecond.

    Raises ValueError for another text, for a day that its month does not have, and for a time of over a year ahead.
    """
    try:
        if MOMENT.fullmatch(given) is None:
            raise ValueError
        moment = datetime.fromisoformat(given)
    except ValueError:
        raise ValueError("is not a time with an offset, such as 2026-12-01T10:00:00+01:00") from None
    if moment.timestamp() > clock.wall() + YEAR:
        raise ValueError("must be at most a year ahead")
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def normal_properties(field: str, raw: Mapping[str, str | Sequence[str]]) -> Properties:
    """The normal form, in which property sets are stored and compared.

    Accepts one value or several for each key. Raises BadInput for more than 64 keys, an empty key or value, or a
    key with its values of more than 1 KB.
    """
    if len(raw) > MAX_PROPERTIES:
        raise BadInput(field, f"has {len(raw)} keys, at most {MAX_PROPERTIES} are allowed")
    normal: Properties = {}
    for key in sorted(raw):
        given = raw[key]
        values = [given] if isinstance(given, str) else list(given)
        if not key or not values or not all(values):
            raise BadInput(f"{field}.{escaped(key, 60)}", "key and values must not be empty")
        check_text(f"{field}.{escaped(key, 60)}", key + "".join(values), MAX_PROPERTY_BYTES)
        normal[key] = sorted(set(values))
    return normal


def check_unreserved(field: str, names: Iterable[str]) -> None:
    """Raise BadInput, naming `field`, if a request asks for the property that only the farm door may ask for."""
    if FARM in names:
        raise BadInput(field, f"names '{FARM}', as only requests of the farm door do")


def check_dedup_key(field: str, key: str | None) -> None:
    """Raise BadInput, naming `field`, for a deduplication key that only the farm door may use."""
    if key is not None and key.startswith(ACTION_KEY):
        raise BadInput(field, f"begins with '{ACTION_KEY}', as only those of the farm door do")


def check_json(field: str, raw: bytes, limit: int) -> str:
    """Return `raw` as text if it is JSON of at most `limit` bytes (see `parse_json`); raise BadInput otherwise."""
    if len(raw) > limit:
        raise BadInput(field, f"is larger than {limit} bytes")
    parse_json(raw, field)
    return raw.decode()


def parse_json(raw: bytes | str, field: str = "body") -> Any:
    """Decode JSON strictly; raise BadInput for anything that Python and PostgreSQL read differently.

    Refused: invalid UTF-8, duplicate keys, NaN and Infinity, numbers outside float range, `\\u0000`, lone
    surrogates, nesting deeper than 64, more than 1,000,000 values and keys, an object of more than 10,000 keys.
    """
    try:
        document = raw.decode() if isinstance(raw, bytes) else raw
        # Counted before decoding, which holds up every other thread until it is done.
        if len(document) > MAX_JSON_NODES and count_nodes(document) > MAX_JSON_NODES:
            raise _Refused(f"holds more than {MAX_JSON_NODES} values and keys")
        value = _DECODER.decode(document)
    except UnicodeDecodeError:
        raise BadInput(field, "is not UTF-8") from None
    except RecursionError:
        raise BadInput(field, f"is nested deeper than {MAX_JSON_DEPTH}") from None
    except _Refused as refused:
        raise BadInput(field, str(refused)) from None
    except ValueError as error:
        raise BadInput(field, f"is not JSON: {escaped(str(error), 120)}") from None
    if document.count("[") + document.count("{") >= MAX_JSON_DEPTH:
        _check_depth(value, field)
    if isinstance(raw, str) or "\\u" in document:
        # Bytes that are UTF-8 hold half of a surrogate pair only escaped, and JSON holds NUL only escaped.
        _check_texts(value, field)
    return value


class _Refused(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_JSON_KEYS:
        raise _Refused(f"has an object of {len(pairs)} keys, at most {MAX_JSON_KEYS} are allowed")
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise _Refused(f"repeats the key '{escaped(names.most_common(1)[0][0], 60)}'")
    return found


def _no_constant(name: str) -> Never:
    raise _Refused(f"holds {name}, which is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise _Refused(f"holds {escaped(digits, 40)}, which is too large for a number")
    return value


#: One for all documents: `json.loads` makes a new one for each, which takes as long as a small document.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _check_depth(root: Any, field: str) -> None:
    """Raise BadInput if there are more than MAX_JSON_DEPTH levels of values."""
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise BadInput(field, f"is nested deeper than {MAX_JSON_DEPTH}")
        holders = (each for each in level if isinstance(each, (dict, list)))
        level = list(chain.from_iterable(each.values() if isinstance(each, dict) else each for each in holders))


def _check_texts(root: Any, field: str) -> None:
    """Raise BadInput for a text that PostgreSQL cannot hold, or a key that is one."""
    level = [root]
    while level:
        deeper: list[Any] = []
        for node in level:
            if isinstance(node, str):
                check_text(field, node, 1 << 30)
            elif isinstance(node, dict):
                deeper += node.keys()
                deeper += node.values()
            elif isinstance(node, list):
                deeper += node
        level = deeper


def metrics_place(host: str | None, port: int | None) -> tuple[str, int] | None:
    """Return the address and port of `--metrics-host` and `--metrics-port`; None = no metrics are served.

    Raises BadInput for an address without a port.
    """
    if port is not None:
        return host or "127.0.0.1", port
    if host is not None:
        raise BadInput("--metrics-host", "serves nothing without --metrics-port")
    return None


def metrics_refusal(place: tuple[str, int], error: OSError | UnicodeError) -> BadInput:
    """Return why metrics cannot be served there, blamed on the option that is wrong."""
    is_of_host = isinstance(error, UnicodeError | socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    said = error.strerror if isinstance(error, OSError) else "is no name of a host"
    host, port = place
    return BadInput(f"--metrics-{'host' if is_of_host else 'port'}", f"cannot listen on {host}:{port}: {said}")
