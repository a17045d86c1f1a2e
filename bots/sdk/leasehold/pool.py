"""`Pool`: one pool as a program sees it, with the functions that it may run as jobs."""

import os
import random
from functools import cached_property
from typing import Self

from leasehold.client import Client
from leasehold.errors import BadInput
from leasehold.json_values import Serialiser
from leasehold.tasks import TaskRegistry


class Pool(TaskRegistry):
    """A gateway with a token, and the tasks of one app.

    url, token: as for Client. None = LEASEHOLD_URL and LEASEHOLD_TOKEN, read when the client is first used: a bot
    imports the module of a pool without them. app, serialiser: see TaskRegistry.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        app: str | None = None,
        serialiser: Serialiser | None = None,
    ) -> None:
        super().__init__(app=app, serialiser=serialiser)
        self._url, self._token = url, token

    @classmethod
    def from_env(cls, *, app: str | None = None, serialiser: Serialiser | None = None) -> Self:
        """Return the pool that LEASEHOLD_URL and LEASEHOLD_TOKEN name."""
        return cls(app=app, serialiser=serialiser)

    @cached_property
    def client(self) -> Client:
        """The client of this pool. Raises BadInput if neither arguments nor environment name a gateway and a token."""
        url, token = self._url or os.environ.get("LEASEHOLD_URL"), self._token or os.environ.get("LEASEHOLD_TOKEN")
        if url is None or token is None:
            raise BadInput("url" if url is None else "token", "is neither given nor set in the environment")
        return Client(url, token, chance=random.SystemRandom())
