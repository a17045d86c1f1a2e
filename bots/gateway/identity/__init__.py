"""Who callers are by their tokens: the pool's, and JSON Web Tokens of other issuers, as OpenID Connect has them.

Anything may be imported from here. Read first: bearers.py and issuers.py.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bots.gateway.identity.issuers import Issuers
    from bots.gateway.identity.settings import IdentitySettings


def verifier(settings: "IdentitySettings") -> "Issuers | None":
    """Return what verifies the tokens of the configured issuers; None without any, which needs no PyJWT."""
    if not settings.issuers:
        return None
    from bots.gateway.identity.issuers import Issuers

    return Issuers(settings)
