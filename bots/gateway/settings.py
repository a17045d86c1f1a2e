"""Settings of the gateway.

Every process of the pool reads the whole configuration, so this module imports nothing of the HTTP server.
"""

from ipaddress import ip_address
from pathlib import Path
from typing import Self

from leasehold import wire
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class GatewaySettings(BaseModel):
    """Settings of the gateway: addresses and limits.

    host, port: the TCP address; port 0 takes any free port. An address other than loopback needs TLS or `insecure`.
    unix_socket: path of a socket, mode 0600, to listen on instead of TCP.
    tls_cert, tls_key: PEM files.
    insecure: serve plain HTTP to other machines. Anybody on the network can then read the tokens.
    max_body: largest body of a request in bytes, at least 16 MiB, because clients and bots rely on that. Doubling it
        doubles what one submit may hold, and the memory that one request may need.
    max_wait: longest time in seconds for which a long poll is held. Doubling it halves the calls of idle bots and
        callers.
    queue: how many pieces of database work may wait for a connection. Doubling it doubles the longest wait before an
        overloaded gateway answers 503.
    token_cache_seconds: seconds for which a verified token is remembered. Doubling it halves the token queries and
        doubles the time for which a revoked token may still work.
    max_connections: how many connections may be open; more are answered 503 and closed. None = as many as the limit
        of open files permits, at most 32,768. Each needs about 10 KB.
    max_connections_per_address: how many of them may come from one address, or from one /64 network of IPv6. None =
        half of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    port: int = Field(default=7411, ge=0, le=65535)
    unix_socket: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    max_body: int = Field(default=wire.LEAST_BODY, le=1024 * 1024 * 1024)
    max_wait: float = Field(default=60.0, ge=0, le=60)
    queue: int = Field(default=1000, ge=1, le=1_000_000)
    token_cache_seconds: float = Field(default=5.0, ge=0, le=300)
    max_connections: int | None = Field(default=None, ge=1, le=1_000_000)
    max_connections_per_address: int | None = Field(default=None, ge=1, le=1_000_000)

    @field_validator("max_body")
    @classmethod
    def _has_room_for_all(cls, given: int) -> int:
        if given < wire.LEAST_BODY:
            raise ValueError(f"must be at least {wire.LEAST_BODY}: clients and bots rely on that")
        return given

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both or neither")
        if self.unix_socket is None and self.tls_cert is None and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host '{self.host}' can be reached from other machines: "
                "give tls_cert and tls_key, or set insecure = true"
            )
        return self


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach that address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
