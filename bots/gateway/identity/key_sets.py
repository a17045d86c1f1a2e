"""The public keys of an issuer, read from its URL or a file, and read again as they are exchanged."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
from leasehold.errors import LeaseholdError, NotReady, Unauthorised
from leasehold.wire import escaped

from bots.gateway.identity.settings import Issuer
from schema import clock

#: Seconds after which keys may be read again that could not be read, or that did not have a key that a token names.
AGAIN = 30.0
#: Seconds after which keys are read again, while the present ones are used. After twice as long without a try they are
#: read first: for so long at most a key works that its issuer has withdrawn, unless its keys cannot be read.
REFRESH = 600.0
#: Seconds for which keys stay in use that cannot be read again.
OLDEST = 86_400.0
#: The most bytes of a key set, and the seconds that its URL may take to send it.
MAX_BYTES, TIMEOUT = 1_048_576, 10.0

log = structlog.get_logger()

#: A public key as a key set has it, RFC 7517.
Key = Mapping[str, Any]


class Unreadable(LeaseholdError):
    """A key set that cannot be read now. The message is one clause."""


class KeySet:
    """The keys of one issuer, for one event loop. read: returns the document at its place, or raises `Unreadable`."""

    def __init__(self, issuer: Issuer, *, read: Callable[[str], Awaitable[bytes]] | None = None) -> None:
        self._issuer, self._read = issuer, read or read_keys
        self._keys: list[Key] = []
        self._read_at = self._tried_at = -OLDEST
        self._reading: asyncio.Task[None] | None = None

    async def key(self, name: str | None) -> Key:
        """Return the key with that name, or the only one for None. Raises Unauthorised, and NotReady without any keys.

        Keys that are due are read again while the present ones are used, unless nobody has asked for long.
        """
        now = clock.monotonic()
        if not self._keys or now >= self._read_at + OLDEST:
            await self._refreshed()
        elif now >= self._tried_at + 2 * REFRESH:
            await asyncio.shield(self._begin())
        elif now >= self._read_at + REFRESH and self._may_try(now):
            self._begin()
        found = self._find(name)
        if found is None and self._may_try(now):
            await self._refreshed()
            found = self._find(name)
        if found is None:
            raise Unauthorised(f"the token is signed with a key that its issuer '{self._issuer.name}' does not have")
        return found

    def _find(self, name: str | None) -> Key | None:
        if name is None:
            return self._keys[0] if len(self._keys) == 1 else None
        return next((each for each in self._keys if each.get("kid") == name), None)

    def _may_try(self, now: float) -> bool:
        return now >= self._tried_at + AGAIN

    def _begin(self) -> "asyncio.Task[None]":
        if self._reading is None or self._reading.done():
            self._tried_at = clock.monotonic()
            self._reading = asyncio.create_task(self._take())
        return self._reading

    async def _refreshed(self) -> None:
        """Read the keys, if that is not forbidden for a while. Raises NotReady if there are none to be used then."""
        underway = self._reading is not None and not self._reading.done()
        if underway or self._may_try(clock.monotonic()):
            # A caller that hangs up is cancelled; the read goes on for the others.
            await asyncio.shield(self._begin())
        if clock.monotonic() >= self._read_at + OLDEST:
            raise NotReady(f"the keys of issuer '{self._issuer.name}' cannot be read; the log of this process says why")

    async def _take(self) -> None:
        try:
            self._keys = parse(await self._read(self._issuer.jwks))
        except Unreadable as error:
            log.warning(
                "the keys of an issuer of tokens cannot be read",
                issuer=self._issuer.name, place=self._issuer.jwks, reason=str(error),
            )  # fmt: skip
        else:
            self._read_at = clock.monotonic()


def parse(document: bytes) -> list[Key]:
    """Return the keys of a JSON Web Key Set that may sign. Raises Unreadable if there is none."""
    try:
        keys = json.loads(document)["keys"]
        found: list[Key] = [each for each in keys if isinstance(each, dict) and each.get("use", "sig") == "sig"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Unreadable("is not a JSON Web Key Set") from None
    if not found:
        raise Unreadable("has no keys that sign")
    return found


async def read_keys(place: str) -> bytes:
    """Return what is at an absolute path or a URL, of at most `MAX_BYTES`. Raises Unreadable."""
    if place.startswith("/"):
        return await asyncio.to_thread(_read_file, Path(place))
    import httpx

    limits = httpx.Timeout(TIMEOUT)
    try:
        async with (
            asyncio.timeout(TIMEOUT),
            httpx.AsyncClient(timeout=limits, follow_redirects=False) as client,
            client.stream("GET", place, headers={"Accept": "application/json"}) as answer,
        ):
            if answer.status_code != 200:
                raise Unreadable(f"the server answers {answer.status_code}")
            found = b""
            async for part in answer.aiter_bytes():
                found += part
                if len(found) > MAX_BYTES:
                    raise Unreadable(f"has more than {MAX_BYTES} bytes")
            return found
    except (TimeoutError, httpx.TimeoutException):
        raise Unreadable(f"the server does not answer within {TIMEOUT:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise Unreadable(f"the server cannot be reached: {escaped(str(error), 200)}") from None


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None
    if len(found) > MAX_BYTES:
        raise Unreadable(f"has more than {MAX_BYTES} bytes")
    return found
