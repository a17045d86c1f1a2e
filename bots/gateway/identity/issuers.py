"""From a signed token (JSON Web Token, RFC 7519) to its holder: signature, time, issuer and audience, then claims."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jwt
from leasehold.errors import BadInput, Forbidden, Unauthorised
from leasehold.wire import escaped

from bots.gateway.identity.key_sets import Key, KeySet
from bots.gateway.identity.settings import Holder, IdentitySettings, Issuer, Wanted
from schema import clock, validation
from schema.tenancy.tokens import Principal

#: The longest token, characters, and the most characters of its subject that histories show.
MAX_TOKEN, MAX_SUBJECT = 8192, 150
#: Hexadecimal digits of the digest with which the id of a longer subject ends.
DIGEST = 16
#: Seconds by which the clock of an issuer may differ.
LEEWAY = 30.0
#: An end that no clock reaches, seconds since 1970. Integers of JSON have no bounds.
END = 2**53
#: What a token must say beside its signature.
REQUIRED = ["iss", "aud", "sub", "exp"]


class Issuers:
    """The issuers whose tokens count."""

    def __init__(self, settings: IdentitySettings) -> None:
        self._issuers = {each.issuer: (each, KeySet(each)) for each in settings.issuers}

    def may_be(self, token: str) -> bool:
        """True if this has the form of a signed token, and there is an issuer that could have signed it."""
        return bool(self._issuers) and token.count(".") == 2

    async def holder(self, token: str) -> tuple[Principal, float]:
        """Return who holds the token, and for how many seconds it is valid.

        Raises Unauthorised for a token that is not valid, Forbidden if nothing is allowed to its claims, and NotReady
        if the keys of its issuer are not known.
        """
        if len(token) > MAX_TOKEN:
            raise Unauthorised(f"the token has more than {MAX_TOKEN} characters")
        try:
            header = jwt.get_unverified_header(token)
            said = jwt.decode(token, options={"verify_signature": False})
        except (jwt.InvalidTokenError, ValueError, RecursionError):
            raise Unauthorised("this is not a signed token: its parts are not those of a JSON Web Token") from None
        named = said.get("iss")
        found = self._issuers.get(named) if isinstance(named, str) else None
        if found is None:
            raise Unauthorised(f"the token's issuer '{escaped(str(named), 120)}' is not one of this pool's")
        issuer, keys = found
        if header.get("alg") not in issuer.algorithms:
            raise Unauthorised(f"the token is not signed by one of {', '.join(issuer.algorithms)}")
        name = header.get("kid")
        key = await keys.key(name if isinstance(name, str) else None)
        claims = verified(token, issuer, key, header["alg"])
        return principal(issuer, claims), min(int(claims["exp"]), END) + LEEWAY - clock.wall()


def verified(token: str, issuer: Issuer, key: Key, algorithm: str) -> Mapping[str, Any]:
    """Return the claims of a token that this key has signed for this pool. Raises Unauthorised."""
    if key.get("alg", algorithm) != algorithm:
        raise Unauthorised(f"the token's key of issuer '{issuer.name}' is not for {algorithm}")
    try:
        found: Mapping[str, Any] = jwt.decode(
            token,
            jwt.PyJWK(dict(key), algorithm=algorithm),
            algorithms=[algorithm],
            audience=issuer.audience,
            issuer=issuer.issuer,
            leeway=LEEWAY,
            options={"require": REQUIRED, "enforce_minimum_key_length": True},
        )
    except jwt.ExpiredSignatureError:
        raise Unauthorised("the token has expired") from None
    except jwt.ImmatureSignatureError:
        raise Unauthorised("the token is not valid yet") from None
    except jwt.InvalidAudienceError:
        raise Unauthorised(f"the token is not for the audience '{issuer.audience}'") from None
    except jwt.MissingRequiredClaimError as error:
        raise Unauthorised(f"the token does not say '{error.claim}'") from None
    except jwt.InvalidKeyError:
        raise Unauthorised(f"the token's key of issuer '{issuer.name}' cannot be used for {algorithm}") from None
    except (jwt.PyJWTError, ValueError, OverflowError):
        raise Unauthorised(f"the signature is not that of issuer '{issuer.name}'") from None
    return found


def principal(issuer: Issuer, claims: Mapping[str, Any]) -> Principal:
    """Return the first holder of the issuer whose claims these are. Raises Forbidden. Pure."""
    for holder in issuer.holders:
        if all(fits(claims.get(name), wanted) for name, wanted in holder.claims.items()):
            return Principal(id=f"{issuer.name}/{_of_subject(str(claims['sub']))}", **_limits(holder, claims))
    raise Forbidden(f"token: nothing is allowed to such claims of issuer '{issuer.name}'")


def _of_subject(subject: str) -> str:
    """Return a subject as the printable end of an id. No two subjects have the same one: a backslash is escaped too,
    and a long one ends with its digest."""
    shown = subject.encode("unicode_escape").decode("ascii")
    if len(shown) <= MAX_SUBJECT:
        return shown
    digest = hashlib.sha256(shown.encode()).hexdigest()[:DIGEST]
    return f"{shown[: MAX_SUBJECT - DIGEST - 1]}…{digest}"


def fits(claim: object, wanted: Wanted) -> bool:
    """True if a claim is as it must be. Pure."""
    match wanted:
        case dict():
            return isinstance(claim, Mapping) and all(fits(claim.get(name), each) for name, each in wanted.items())
        case tuple():
            return any(fits(claim, each) for each in wanted)
        case _ if isinstance(claim, Sequence) and not isinstance(claim, str):
            return any(fits(each, wanted) for each in claim if not isinstance(each, Mapping | list))
        case bool():
            return claim is wanted
        case str():
            if not isinstance(claim, str):
                return False
            return claim.startswith(wanted[:-1]) if wanted.endswith("*") else claim == wanted


def _limits(holder: Holder, claims: Mapping[str, Any]) -> dict[str, Any]:
    instance = holder.instance
    if holder.instance_claim is not None:
        named = claims.get(holder.instance_claim)
        try:
            instance = validation.check_name(holder.instance_claim, named if isinstance(named, str) else "")
        except BadInput as error:
            raise Forbidden(f"token: the claim {error}") from None
    return {
        "kind": holder.kind,
        "instance": instance,
        "bot": holder.bot,
        "priority_ceiling": holder.priority_ceiling,
        "properties": holder.properties,
        "labels": holder.labels,
        "pool": holder.pool,
    }
