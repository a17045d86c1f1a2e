"""Settings of the farm door.

Every process of the pool reads the whole configuration, so this module imports nothing of gRPC.
"""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bots.gateway.settings import is_loopback
from schema.fields import Name
from schema.validation import MAX_TIMEOUT

#: The port of the door unless another is given, and the name of the socket or server that keeps blobs.
PORT = 8980
_ADDRESS = r"^(grpc://[^/\s]+:[0-9]{1,5}|unix:/\S+)$"


class FarmSettings(BaseModel):
    """Settings of the farm door: its address, its storage, and how actions run.

    host, port: the TCP address. Only this machine may reach it: `host` is a loopback address.
    cas: the server that keeps blobs and cached results, `grpc://HOST:PORT` or `unix:/PATH`. Only the door may reach it.
        A program that writes there decides which results all callers get.
    cas_instance: what that server calls its instance.
    anonymous: the instance to which callers without a token submit. Unset: every caller needs a token.
    bots_reach: the address by which bots reach the door. Unset: its own address.
    mounts: directories of a bot's machine that every action sees, as far as they are there.
    max_attempts: how often an action is tried if bots cannot run it or are lost. A failing command is not tried again.
    staging_seconds: seconds that an action may take beside its own time-out, to fetch its inputs and store its outputs.
    repeat_seconds: seconds after which a waiting client is told again how its action stands. Doubling it halves the
        messages; connections over which nothing comes are cut by some balancers after 60 s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    port: int = Field(default=PORT, ge=0, le=65535)
    cas: str | None = Field(default=None, pattern=_ADDRESS)
    cas_instance: str = Field(default="", max_length=255)
    anonymous: Name | None = None
    bots_reach: str | None = Field(default=None, pattern=_ADDRESS)
    mounts: tuple[Annotated[str, Field(pattern=r"^/[^:\s]*$")], ...] = (
        *("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives"),
    )
    max_attempts: int = Field(default=3, ge=1, le=100)
    staging_seconds: float = Field(default=60.0, gt=0, le=MAX_TIMEOUT)
    repeat_seconds: float = Field(default=30.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _stays_on_this_machine(self) -> Self:
        if not is_loopback(self.host):
            raise ValueError(f"host '{self.host}' can be reached from other machines: the door has no TLS yet")
        return self
