"""Settings of the farm door.

Every process of the pool reads the whole configuration, so this module imports nothing of gRPC.
"""

import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Self

from leasehold.errors import BadInput
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bots.gateway.settings import is_loopback
from schema.fields import Name
from schema.tenancy import tokens
from schema.timing import Timing
from schema.validation import PRIORITY_MAX, PRIORITY_MIN, YEAR, ResourceName

#: The port of the door unless another is given, and the name of the socket or server that keeps blobs.
PORT = 8980
MAX_PORT = 65535
#: What clients tell of the build that an action belongs to.
Told = Literal["invocation", "correlated", "target", "mnemonic", "tool"]
METADATA: tuple[Told, ...] = ("invocation", "correlated", "target", "mnemonic", "tool")
_SERVER = re.compile(r"grpcs?://[^/\s]+:([0-9]{1,5})")
_SOCKET = re.compile(r"unix:/\S+")
_PATH = re.compile(r"/\S+")
_MOUNT = re.compile(r"/[^:\s]*")
_COMMON_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@ -]{0,63}")


def door_address(value: str) -> str:
    """Return the address if it may be that of a door. Raises ValueError."""
    found = _SERVER.fullmatch(value)
    if found is None or not 0 < int(found[1]) <= MAX_PORT:
        raise ValueError("is no address: write grpc://HOST:PORT, or grpcs://HOST:PORT with TLS")
    return value


def _storage_address(value: str) -> str:
    try:
        return value if _SOCKET.fullmatch(value) else door_address(value)
    except ValueError:
        raise ValueError("is no address: write grpc://HOST:PORT, grpcs://HOST:PORT with TLS, or unix:/PATH") from None


def _formed(form: re.Pattern[str], otherwise: str) -> AfterValidator:
    def check(value: str) -> str:
        if not form.fullmatch(value):
            raise ValueError(otherwise)
        return value

    return AfterValidator(check)


_StorageAddress = Annotated[str, AfterValidator(_storage_address)]
_DoorAddress = Annotated[str, AfterValidator(door_address)]
_Path = Annotated[str, _formed(_PATH, "is no path: it begins with '/' and has no spaces")]
_Mount = Annotated[str, _formed(_MOUNT, "is no path: it begins with '/' and has neither ':' nor spaces")]
_CommonName = Annotated[
    str, _formed(_COMMON_NAME, "is no common name: use letters, digits, '.', '_', '@', '-' and ' ', at most 64")
]


#: How often a worker's session lasts as long as a bot's. Before each new try at a door that is away, buildbox-worker
#: waits 1.6 times as long: after a door has been away for 25 seconds, it may come back only after 40.
LASTS = 2


def timing_of_workers(timing: Timing) -> Timing:
    """Return the times that the door and its workers agree on."""
    return timing.model_copy(update={"ttl": timing.ttl * LASTS})


class CertificateScope(BaseModel):
    """What the holders of certificates with one common name may do: the same as the holder of a token.

    kind: the kind of that token. instance, priority_ceiling: of a submitter, and `bot` of a bot, as of tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["submitter", "bot", "operator"] = "submitter"
    instance: Name | None = None
    priority_ceiling: int | None = Field(default=None, ge=PRIORITY_MIN, le=PRIORITY_MAX)
    bot: str | None = Field(default=None, min_length=1, max_length=64)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        try:
            tokens.check_scope(
                tokens.Kind(self.kind),
                instance=self.instance,
                bot=self.bot,
                ceiling=self.priority_ceiling,
                properties=None,
                labels=None,
                pool=None,
            )
        except BadInput as error:
            raise ValueError(str(error)) from None
        return self


class Amount(BaseModel):
    """The amount of a resource that a property asks for by a number.

    kind: the resource. times: its units for each 1 of the property, such as 1000 for cores in cpu_milli.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: ResourceName
    times: float = Field(default=1.0, gt=0, le=1_000_000_000)


class PropertyPolicy(BaseModel):
    """What the platform properties of actions mean. Each name is in one place at most.

    match: a bot must offer them. wildcard: they are for the runner, and decide nothing about the bot.
    preferred: a bot that offers them is looked for first, for `prefer_seconds` before any other may take the action.
    label: the one whose value is the job's label, which decides its cohort. units: the one whose value is the number of
        units of a bot. resources: those whose values are amounts.
    unknown: what others mean: as `match`, nothing, or that the action is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    match: tuple[str, ...] = ()
    wildcard: tuple[str, ...] = ()
    preferred: tuple[str, ...] = ()
    prefer_seconds: float = Field(default=5.0, gt=0, le=YEAR)
    label: str | None = None
    units: str | None = None
    resources: Mapping[str, Amount] = Field(default_factory=dict)
    unknown: Literal["match", "ignore", "refuse"] = "match"

    @model_validator(mode="after")
    def _names_each_once(self) -> Self:
        single = [each for each in (self.label, self.units) if each is not None]
        names = [*self.match, *self.wildcard, *self.preferred, *single, *self.resources]
        if twice := sorted({each for each in names if names.count(each) > 1}):
            raise ValueError(f"'{twice[0]}' is named twice: a property means one thing")
        return self


class FarmSettings(BaseModel):
    """Settings of the farm door: its address, its storage, and how actions run.

    host, port: the TCP address. Unless `host` is a loopback address, the door needs TLS, and its callers are known.
    tls_cert, tls_key: PEM files. Unset: no TLS, and only this machine may reach the door.
    tls_client_ca: PEM file of the authorities whose certificates callers must have. Unset: callers have tokens.
    certificates: common name of a caller's certificate → what its holder may do if it sends no token.
    cas: the server that keeps blobs and cached results, `grpc://HOST:PORT`, `grpcs://HOST:PORT` with TLS, or
        `unix:/PATH`. Only the door may reach it. A program that writes there decides which results all callers get.
    cas_ca, cas_cert, cas_key: PEM files for TLS to that server: its authorities, unset: those that gRPC knows, and the
        door's own certificate and key, if the server asks for them.
    cas_instance: what that server calls its instance.
    instances: what clients and workers call an instance → its name here. Others call it by that name.
    anonymous: the instance to which callers without a token submit. Unset: every caller needs a token, or a
        certificate that is named.
    anonymous_workers: true if workers of the Remote Workers API need neither a token nor a certificate. Then everybody
        who reaches the door can run actions, and so decides which results all callers get.
    bots_reach: the address by which bots reach the door. Unset: its own address.
    bots_ca, bots_token_file, bots_cert, bots_key: files on the bots' machines by which actions' runners know the door
        and are known to it, where the door asks for that. Accounts that run jobs must be able to read them.
    mounts: directories of a bot's machine that every action sees, as far as they are there.
    max_attempts: how often an action is tried if bots cannot run it or are lost. A failing command is not tried again.
    staging_seconds: seconds that an action may take beside its own time-out, to fetch its inputs and store its outputs.
    queue_seconds: seconds that an action may wait for a bot; then its client is told why none has taken it. Unset: it
        waits for ever, unless operators set a ceiling.
    abandoned_seconds: seconds after which an action is withdrawn whose client has gone, as most do at Ctrl-C. A
        client that has only lost its connection comes back sooner. It goes on for others who want it. Unset: it goes
        on.
    earlier_build_first: of the builds of an instance that have clients, all but the one that began first stand one step
        of priority behind what their clients ask for. So its new actions go before theirs that wait.
    metadata: which of the build's facts that clients tell are kept with each job, to find and cancel all of a build.
    blob_calls: calls for blobs and results that are passed on at once; more wait. Doubling it doubles the memory that
        they may need, at most 6 MiB each.
    properties: what the properties of actions' platforms mean.
    repeat_seconds: seconds after which a waiting client is told again how its action stands. Doubling it halves the
        messages; connections over which nothing comes are cut by some balancers after 60 s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", min_length=1, max_length=255)
    port: int = Field(default=PORT, ge=0, le=MAX_PORT)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    certificates: Mapping[_CommonName, CertificateScope] = Field(default_factory=dict)
    cas: _StorageAddress | None = None
    cas_ca: Path | None = None
    cas_cert: Path | None = None
    cas_key: Path | None = None
    cas_instance: str = Field(default="", max_length=255)
    instances: Mapping[Annotated[str, Field(min_length=1, max_length=255)], Name] = Field(default_factory=dict)
    anonymous: Name | None = None
    anonymous_workers: bool = False
    bots_reach: _DoorAddress | None = None
    bots_ca: _Path | None = None
    bots_token_file: _Path | None = None
    bots_cert: _Path | None = None
    bots_key: _Path | None = None
    mounts: tuple[_Mount, ...] = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives")
    max_attempts: int = Field(default=3, ge=1, le=100)
    staging_seconds: float = Field(default=60.0, gt=0, le=YEAR)
    queue_seconds: float | None = Field(default=None, gt=0, le=YEAR)
    abandoned_seconds: float | None = Field(default=None, ge=10, le=86_400)
    earlier_build_first: bool = False
    metadata: tuple[Told, ...] = METADATA
    blob_calls: int = Field(default=128, ge=1, le=100_000)
    properties: PropertyPolicy = Field(default_factory=PropertyPolicy)
    repeat_seconds: float = Field(default=30.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _relations(self) -> Self:
        for one, other in (("tls_cert", "tls_key"), ("bots_cert", "bots_key"), ("cas_cert", "cas_key")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} belong together: give both or neither")
        if (self.cas or "").startswith("grpc:") and any((self.cas_ca, self.cas_cert)):
            raise ValueError("cas has no TLS: let it begin with grpcs://, or leave cas_ca and cas_cert out")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca means nothing without tls_cert")
        if self.certificates and self.tls_client_ca is None:
            raise ValueError("certificates mean nothing without tls_client_ca")
        if self.is_local:
            return self
        reached = f"host '{self.host}' can be reached from other machines"
        if self.tls_cert is None:
            raise ValueError(f"{reached}: give tls_cert and tls_key")
        if self.anonymous is not None and self.tls_client_ca is None:
            raise ValueError(f"{reached}: callers without a token (anonymous) need certificates (tls_client_ca)")
        if self.anonymous_workers:
            raise ValueError(f"{reached}: there workers need tokens or certificates (anonymous_workers)")
        if self.is_everywhere and self.bots_reach is None:
            raise ValueError(f"host '{self.host}' is no address for bots: set bots_reach")
        return self

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the door."""
        return is_loopback(self.host)

    @property
    def is_everywhere(self) -> bool:
        """True if the door listens on all addresses of this machine."""
        try:
            return ip_address(self.host).is_unspecified
        except ValueError:
            return False
