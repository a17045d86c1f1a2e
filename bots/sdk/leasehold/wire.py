"""Bounds of what every gateway takes, text that is safe to show, and the name that was meant by a misspelt one."""

from collections.abc import Iterable

#: Values and keys of one JSON document: a hundred for each job of the largest batch. Doubling it doubles the memory and
#: time that one document may take.
MAX_JSON_NODES = 1_000_000
#: Lists and objects inside each other in one JSON document.
MAX_JSON_DEPTH = 64
#: Bytes of JSON text of a job's result, and of its checkpoint.
MAX_RESULT_BYTES = MAX_CHECKPOINT_BYTES = 64 * 1024
#: Bytes of the key by which a job joins an unfinished one.
MAX_DEDUP_KEY_BYTES = 200
#: Bytes that every gateway accepts in one request, however it is configured. The largest call of a bot fits: the ends
#: of 10,000 leases, and as much output as one attempt may have.
LEAST_BODY = 16 * 1024 * 1024
#: Jobs in one request.
MAX_BATCH = 10_000
#: Jobs in one page of a list, and ids in one request.
MAX_LIST = 1000


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


def escaped(value: object, limit: int = 200) -> str:
    """A value for a message: control characters are escaped, and it is cut at `limit` characters."""
    shown = value.encode("unicode_escape").decode("ascii") if isinstance(value, str) else repr(value)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def printable(text: str, limit: int | None = None) -> str:
    """Text that is safe on a terminal: unprintable characters are escaped, and it is cut at `limit` characters."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )
    return shown if limit is None or len(shown) <= limit else shown[: limit - 1] + "…"


def meant(wrong: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar; None if none is similar."""
    import difflib  # most programs misspell nothing

    return next(iter(difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)), None)


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """The text `; did you mean 'x'?` with the most similar known name; empty if none is similar."""
    close = meant(wrong, known)
    return "" if close is None else f"; did you mean '{close}'?"
