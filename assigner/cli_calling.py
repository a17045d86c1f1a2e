"""How operators' commands reach a gateway, as the composition root gives it to them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

Record = dict[str, Any]


class Gateway(Protocol):
    """A way to one gateway."""

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | float] | None = None,
        body: Record | None = None,
        held: float = 0.0,
    ) -> Record:
        """One request, repeated while its outcome is unknown; `held`: seconds that the gateway may take. Raises the
        error that a refusal stands for."""


class Caller(Protocol):
    """Which gateway is called, as whom, and how the answer is printed, as the options of a command say."""

    @property
    def json(self) -> bool:
        """Print JSON."""

    def client(self) -> AbstractContextManager[Gateway]:
        """The way to that gateway."""


#: Gives a command the options of a caller, whom it gets as its first argument.
Calling = Callable[[Callable[..., Any]], Callable[..., Any]]
