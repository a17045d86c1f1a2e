"""Signed tokens of other issuers (JSON Web Tokens, as OpenID Connect has them): who holds one, and what it may do.

Anything may be imported from here. Read first: settings.py and issuers.py.
"""
