"""Logging of a process to standard error."""

import json
import logging
import math
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import psycopg
import structlog
from pydantic import BaseModel, ConfigDict
from structlog.typing import ExcInfo


class LogSettings(BaseModel):
    """What assigners, gateways and bots log.

    level: the least important events that they log. `debug` also logs when a node of a graph starts, ends, or
        becomes ready.
    format: `text` is `key=value` lines, coloured on a terminal; `json` an object on each line, for programs that
        collect logs. The one line with which a process that cannot go on ends is text in any case.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


def to_stderr(level: str, format: str = "text") -> None:
    """Log events of at least `level` to standard error, as `LogSettings` has it."""
    is_terminal = sys.stderr.isatty() and format == "text"
    form: Callable[..., Any]
    if is_terminal:
        form = structlog.dev.ConsoleRenderer(exception_formatter=_print_frames)
    elif format == "json":
        form = structlog.processors.JSONRenderer(_json_text)
    else:
        form = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False)
    processors: list[Callable[..., Any]] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.ExceptionRenderer(_frames),
    ]
    structlog.configure(
        processors=[*processors[: 2 if is_terminal else 3], form],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    # A command has called this before it knew its settings.
    earlier = [each for each in logging.root.handlers if isinstance(each.formatter, _Formatter)]
    handler = earlier[0] if earlier else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if format == "json" else _Formatter(logging.BASIC_FORMAT))
    logging.basicConfig(handlers=[handler], level=max(logging.getLevelNamesMapping()[level], logging.WARNING))


def _json_text(line: Any, **_how: Any) -> str:
    return json.dumps(_finite(line), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    """Return a value of a line with None in the place of NaN and infinity, which JSON has not."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
        case _:
            return value


class _Formatter(logging.Formatter):
    """Formats what libraries log through `logging`; errors as `_frames` does."""

    def formatException(self, ei: Any) -> str:
        return _frames(ei)


class _JsonFormatter(_Formatter):
    """The same as JSON, with the names that our own lines have."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat().replace("+00:00", "Z")
        line = {"logger": record.name, "event": record.getMessage(), "level": record.levelname.lower(), "timestamp": at}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _frames(exc_info: ExcInfo) -> str:
    """Format an error with its stack but without local values, which may be a job's data or secret.

    PostgreSQL's errors can quote rows, so only the SQLSTATE is kept; of a missing right also which one, since that text
    names a table or a function, and never a row.
    """
    kind, value, trace = exc_info
    code = getattr(value, "sqlstate", None)
    is_database = isinstance(value, psycopg.Error)
    said = f"SQLSTATE {code}" if code else "no SQLSTATE" if is_database else str(value)
    if isinstance(value, psycopg.errors.InsufficientPrivilege) and value.diag.message_primary:
        said += f", {value.diag.message_primary}"
    return "".join(traceback.format_tb(trace)) + f"{kind.__name__}: {said}"


def _print_frames(stream: TextIO, error: ExcInfo) -> None:
    stream.write("\n" + _frames(error))
