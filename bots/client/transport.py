"""The HTTP transport: addresses of gateways, repeated requests, and problem documents turned into errors."""

import random
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import httpx
from tenacity import RetryCallState, Retrying, retry_if_exception_type

from schema import clock, validation
from schema.errors import BadInput, Conflict, Forbidden, LeaseholdError, NotFound, NotReady, QueueFull, Unauthorised

Record = dict[str, Any]

#: Seconds for which requests to a gateway that never answered are repeated.
FIRST_CONTACT = 3.0
#: The most characters of a refusal that are shown: a cycle of a graph may be long.
MAX_DETAIL = 2000

_AGAIN = frozenset({429, 502, 503, 504})
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class Transport:
    """Sends requests and repeats them; several threads may share a transport. Arguments: see `Client`."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        chance: random.Random,
        timeout: float,
        patience: float,
        sleep: Callable[[float], None] = clock.sleep,
    ) -> None:
        self.url = url
        self._chance, self._timeout, self._patience, self._sleep = chance, timeout, patience, sleep
        self._reached = False
        base, transport = _address(url)
        self._http = httpx.Client(
            base_url=base,
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            transport=transport,
            trust_env=not is_local(url),
            # To read the certificates takes longer than most commands, and only TLS needs them.
            verify=split(url).scheme == "https",
            timeout=timeout,
        )

    def close(self) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | float] | None = None,
        body: Record | None = None,
        held: float = 0.0,
    ) -> Record:
        """Send a request and repeat it while its outcome is unknown.

        held: seconds for which the gateway may hold the request, in addition to the timeout.
        """

        def once() -> httpx.Response:
            try:
                response = self._http.request(method, path, params=query, json=body, timeout=self._timeout + held)
            except httpx.TransportError as error:
                # A connection was accepted, so the address is right and the gateway has an outage.
                self._reached |= not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                raise _Unknown(None) from error
            self._reached = True
            if response.status_code in _AGAIN:
                raise _Unknown(response)
            return response

        tries = Retrying(
            retry=retry_if_exception_type(_Unknown),
            stop=self._enough,
            wait=self._pause,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            response = tries(once)
        except _Unknown as unknown:
            if unknown.response is None:
                raise LeaseholdError(f"cannot reach the gateway at {self.url}: is it running?") from unknown
            raise _refusal(unknown.response) from None
        if not response.is_success:
            raise _refusal(response)
        if response.status_code == httpx.codes.NO_CONTENT:
            return {}
        return _document(response, self.url)

    def _enough(self, state: RetryCallState) -> bool:
        patience = self._patience if self._reached else min(self._patience, FIRST_CONTACT)
        return (state.seconds_since_start or 0.0) >= patience

    def _pause(self, state: RetryCallState) -> float:
        return self._chance.uniform(0.0, min(2.0, 0.05 * 2.0 ** min(state.attempt_number, 30)))


class TooLarge(BadInput):
    """The gateway, or a proxy before it, refused a request because of its size."""


class _Unknown(Exception):
    """The request may or may not have been executed. `response`: a proxy's or gateway's refusal, if there is one."""

    def __init__(self, response: httpx.Response | None) -> None:
        super().__init__()
        self.response = response


def split(url: str) -> SplitResult:
    """Split a gateway's URL into its parts. Raises BadInput if it is not a URL."""
    try:
        parts = urlsplit(url)
        httpx.URL(url)
        if any(sign.isspace() for sign in url):
            raise ValueError("white space")
        return parts
    except (ValueError, UnicodeError, httpx.InvalidURL):
        raise BadInput("url", f"'{validation.escaped(url)}' is not a URL") from None


def is_local(url: str) -> bool:
    """Return True if a token sent to this URL stays on this machine."""
    parts = split(url)
    return parts.scheme == "http+unix" or parts.hostname in _LOOPBACK


def _address(url: str) -> tuple[str, httpx.BaseTransport | None]:
    parts = split(url)
    if parts.scheme == "http+unix":
        path = unquote(parts.netloc + parts.path)
        if not path.startswith("/"):
            raise BadInput("url", f"'{validation.escaped(url)}' does not name a socket by its absolute path")
        return "http://localhost", httpx.HTTPTransport(uds=path, verify=False)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or parts.username or parts.password:
        raise BadInput(
            "url", f"'{validation.escaped(url)}' is not http://HOST:PORT, https://HOST or http+unix:///SOCKET"
        )
    return url.rstrip("/"), None


def _document(response: httpx.Response, url: str) -> Record:
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise LeaseholdError(f"what answers at {url} is not a Leasehold gateway")
    return document


def _refusal(response: httpx.Response) -> LeaseholdError:
    """Turn a problem document into the error that it describes."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {}
    told = str(problem.get("detail") or problem.get("title") or response.reason_phrase)
    detail = validation.printable(told, MAX_DETAIL)
    match response.status_code:
        case 413 if "field" not in problem:
            return TooLarge("request", "is larger than a proxy before the gateway accepts")
        case 413:
            return TooLarge("request", detail.removeprefix(f"{problem['field']}: "))
        case 400 | 415 | 422:
            field = validation.escaped(str(problem.get("field") or "request"), 200)
            return BadInput(field, detail.removeprefix(f"{field}: "))
        case 401:
            return Unauthorised(detail)
        case 403:
            return Forbidden(detail)
        case 404:
            return NotFound(detail)
        case 409 if problem.get("code") == QueueFull.CODE:
            return QueueFull(detail)
        case 409:
            return Conflict(str(problem.get("code") or "conflict"), detail)
        case 503:
            return NotReady(detail)
        case status:
            return LeaseholdError(f"the gateway answered {status}: {detail}")
