"""Bearer tokens of callers: each is verified once, and remembered for some seconds. The farm door uses this too.

It imports nothing of FastAPI, which would make the start of a door last a sixth longer.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from leasehold.errors import Unauthorised

from bots.gateway.workers import WorkerPool
from schema import clock
from schema.tenancy import tokens
from schema.tenancy.tokens import Principal

#: The most verified tokens that are remembered.
REMEMBERED_TOKENS = 10_000


class SignedTokens(Protocol):
    """Verifies tokens that other issuers have signed; see `bots.gateway.identity.issuers`."""

    def may_be(self, token: str, /) -> bool:
        """True if it has the form of a signed token."""
        ...

    async def holder(self, token: str, /) -> tuple[Principal, float]:
        """Return its holder, and for how many seconds it is valid. Raises Unauthorised, Forbidden and NotReady."""
        ...


class TokenCache:
    """Verifies tokens and remembers each verified one for `seconds`.

    A token may therefore work for up to that time after its revocation or expiry; a signed one not after its expiry.
    signed: verifies tokens of other issuers; None = there are none.
    """

    def __init__(self, *, seconds: float, signed: SignedTokens | None = None) -> None:
        self._seconds, self._signed = seconds, signed
        self._known: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()
        self._asked: dict[bytes, asyncio.Task[Principal]] = {}

    async def principal(self, given: Sequence[str], workers: WorkerPool) -> Principal:
        """Return the holder of the bearer token in a request's headers `Authorization`. Raises Unauthorised."""
        if not given:
            raise Unauthorised("a bearer token is needed: Authorization: Bearer lh_…")
        scheme, _, token = given[0].partition(" ")
        if len(given) > 1 or scheme.lower() != "bearer":
            raise Unauthorised("exactly one bearer token is needed: Authorization: Bearer lh_…")
        token = token.strip()
        digest = tokens.digest(token)
        known = self._known.get(digest)
        if known is not None and clock.monotonic() < known[1]:
            return known[0]
        self._known.pop(digest, None)
        if self._signed is not None and self._signed.may_be(token):
            principal, valid = await self._signed.holder(token)
            self._keep(digest, principal, clock.monotonic() + min(self._seconds, valid))
            return principal
        tokens.parse(token)
        if self._seconds == 0:
            return await workers.run(lambda connection: tokens.verify(connection, token))
        # Bots share tokens: when hundreds of them come at once, one query answers for all.
        task = self._asked.get(digest)
        if task is None:
            task = self._asked[digest] = asyncio.create_task(self._verify(token, digest, workers))
        return await asyncio.shield(task)

    async def _verify(self, token: str, digest: bytes, workers: WorkerPool) -> Principal:
        asked_at = clock.monotonic()
        try:
            principal = await workers.run(lambda connection: tokens.verify(connection, token))
        finally:
            del self._asked[digest]
        self._keep(digest, principal, asked_at + self._seconds)
        return principal

    def _keep(self, digest: bytes, principal: Principal, until: float) -> None:
        self._known[digest] = (principal, until)
        while len(self._known) > REMEMBERED_TOKENS:
            self._known.popitem(last=False)
