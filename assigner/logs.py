"""How a process logs."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import structlog


def to_stderr(level: str) -> None:
    """Log from `level` on to standard error: for people on a terminal, else `key=value` lines."""
    is_terminal = sys.stderr.isatty()
    form: Callable[..., Any] = (
        structlog.dev.ConsoleRenderer()
        if is_terminal
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False)
    )
    processors: list[Callable[..., Any]] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*processors[: 2 if is_terminal else 3], form],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    logging.basicConfig(stream=sys.stderr, level=max(logging.getLevelNamesMapping()[level], logging.WARNING))
