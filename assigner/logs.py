"""Logging of a process to standard error."""

import logging
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal, TextIO

import psycopg
import structlog
from pydantic import BaseModel, ConfigDict
from structlog.typing import ExcInfo


class LogSettings(BaseModel):
    """What assigners, gateways and bots log.

    level: the least important events that they log. `debug` also logs when a node of a graph starts, ends, or
        becomes ready.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Literal["debug", "info", "warning", "error"] = "info"


def to_stderr(level: str) -> None:
    """Log events of at least `level` to standard error: coloured text on a terminal, else `key=value` lines."""
    is_terminal = sys.stderr.isatty()
    form: Callable[..., Any] = (
        structlog.dev.ConsoleRenderer(exception_formatter=_print_frames)
        if is_terminal
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False)
    )
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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(logging.BASIC_FORMAT))
    logging.basicConfig(handlers=[handler], level=max(logging.getLevelNamesMapping()[level], logging.WARNING))


class _Formatter(logging.Formatter):
    """Formats what libraries log through `logging`; errors as `_frames` does."""

    def formatException(self, ei: Any) -> str:
        return _frames(ei)


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
