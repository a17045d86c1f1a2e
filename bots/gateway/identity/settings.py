"""Settings of the issuers whose signed tokens the pool accepts.

Every process of the pool reads the whole configuration, so this module imports nothing that verifies signatures.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from leasehold.errors import BadInput
from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator, model_validator

from bots.gateway.settings import is_loopback
from schema import validation
from schema.tenancy import tokens
from schema.tenancy.tokens import Kind

#: What a claim must be: this value, or one of these values.
Value = StrictBool | str | tuple[str, ...]
#: The same, or an object whose claims must be so.
Wanted = Value | dict[str, Value]
#: The algorithms that may sign a token. None of them works with a secret that both sides know.
ALGORITHMS = (
    *(f"{family}{bits}" for family in ("RS", "PS", "ES") for bits in (256, 384, 512)),
    "EdDSA",
)  # fmt: skip


class Holder(BaseModel):
    """Whoever has such claims, and what its tokens may do, as tokens that `leasehold token create` makes.

    claims: what the token must say, by name; all of it. A text that ends in `*` stands for any ending. Of several
        texts one must fit, and of a claim with several values one value.
    kind: `submitter`, `bot` or `operator`.
    instance: the only instance that it may use. None = every one.
    instance_claim: the claim that names the only instance that it may use.
    bot: the name of the bot; a `*` at the end stands for any ending.
    priority_ceiling: the most urgent (lowest) priority that it may ask for. None = any.
    properties: the properties that a bot may declare, and their values; `*` = any value. None = any.
    labels: the labels that a bot may declare; `*` = any.
    pool: the only pool whose instances a bot may serve.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    claims: dict[str, Wanted] = Field(min_length=1)
    kind: Kind
    instance: str | None = None
    instance_claim: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    bot: str | None = None
    priority_ceiling: int | None = None
    properties: dict[str, str | list[str]] | None = None
    labels: tuple[str, ...] | None = None
    pool: str | None = None

    @field_validator("claims")
    @classmethod
    def _is_told_apart(cls, given: dict[str, Wanted]) -> dict[str, Wanted]:
        for name, wanted in given.items():
            if not _tells_apart(wanted):
                raise ValueError(f"{name}: must be a value that not every token has")
        return given

    @field_validator("properties")
    @classmethod
    def _are_properties(cls, given: Any) -> Any:
        try:
            return None if given is None else validation.normal_properties("properties", given)
        except BadInput as error:
            raise ValueError(error.reason) from None

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        try:
            if self.instance_claim is not None and (self.instance, self.pool, self.kind is Kind.OPERATOR) != (
                None, None, False,
            ):  # fmt: skip
                raise BadInput("instance_claim", "means nothing for an operator, or beside instance or pool")
            tokens.check_scope(
                self.kind,
                instance=self.instance,
                bot=self.bot,
                ceiling=self.priority_ceiling,
                properties=self.properties,
                labels=self.labels,
                pool=self.pool,
            )
        except BadInput as error:
            raise ValueError(str(error)) from None
        return self


def _tells_apart(wanted: Wanted) -> bool:
    """True if not every token that has such a claim fits."""
    match wanted:
        case dict():
            return any(_tells_apart(each) for each in wanted.values())
        case tuple():
            return bool(wanted) and all(_tells_apart(each) for each in wanted)
        case _:
            return wanted not in ("*", "")


class Issuer(BaseModel):
    """A service whose signed tokens (JSON Web Tokens) the pool accepts.

    name: a short name. Histories and the audit show callers as `submitter:NAME/SUBJECT`.
    issuer: what its tokens say in `iss`, exactly.
    audience: what they must say in `aud`: a name that stands for this pool and for no other service.
    jwks: where its public keys are, as a JSON Web Key Set: an https URL, or the path of a file.
    algorithms: which signatures count.
    holders: who may do what. The first whose claims fit a token counts; a token that fits none is refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    issuer: str = Field(min_length=1, max_length=500)
    audience: str = Field(min_length=1, max_length=500)
    jwks: str = Field(min_length=1, max_length=2000)
    algorithms: tuple[str, ...] = Field(default=("RS256", "ES256", "EdDSA"), min_length=1)
    holders: tuple[Holder, ...] = Field(min_length=1)

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, given: str) -> str:
        try:
            return validation.check_name("name", given)
        except BadInput as error:
            raise ValueError(error.reason) from None

    @field_validator("algorithms")
    @classmethod
    def _are_known(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            if each not in ALGORITHMS:
                raise ValueError(f"'{each}' is not one of {', '.join(ALGORITHMS)}")
        return given

    @field_validator("jwks")
    @classmethod
    def _are_authentic(cls, given: str) -> str:
        url = urlsplit(given)
        if url.scheme == "https" and url.hostname:
            return given
        if url.scheme == "http":
            if url.hostname and is_loopback(url.hostname):
                return given
            raise ValueError("whoever is on the way could exchange keys that are read by http: give an https URL")
        if not Path(given).is_absolute():
            raise ValueError("must be an https URL, or the path of a file from the root (/…)")
        return given


class IdentitySettings(BaseModel):
    """Who may use the pool with tokens that others have signed, beside those that `leasehold token create` makes.

    issuers: the services that sign them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    issuers: tuple[Issuer, ...] = ()

    @field_validator("issuers")
    @classmethod
    def _can_be_verified(cls, given: tuple[Issuer, ...]) -> tuple[Issuer, ...]:
        for field in ("name", "issuer"):
            values = [getattr(each, field) for each in given]
            if len(set(values)) < len(values):
                raise ValueError(f"two issuers have the same {field}")
        if given and find_spec("jwt") is None:
            raise ValueError("signed tokens need the extra oidc: pip install 'leasehold[oidc]'")
        return given
