"""URLs of PostgreSQL servers in libpq's form, which pools, LISTEN and commands share.

libpq alone reads them, also those with several hosts. What it says about a wrong URL may quote a part of the password
and is therefore never shown.
"""

import re
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

_SCHEME = re.compile(r"postgres(ql)?(\+\w+)?://")
_PASSWORD = re.compile(r"^([^:/]+://[^:@/]*):[^@/]*@")
#: Parts of names of parameters whose values are secret.
_SECRETS = ("pass", "secret", "scram")
#: libpq then connects to the first host that accepts writes, which after a failover may be another one.
_WRITABLE = "target_session_attrs=read-write"


#: What `find_mistake` says of anything else than such a URL.
NO_URL = "must be a postgresql:// URL"


def libpq_url(url: str) -> str:
    """The URL as libpq takes it: without a driver's name; of several hosts, one that accepts writes is wanted.

    A URL that names `target_session_attrs` keeps it. A URL that is not valid is returned as it is.
    """
    plain = _SCHEME.sub("postgresql://", url, count=1)
    parameters = _parsed(plain)
    if len(_hosts(parameters)) < 2 or "target_session_attrs" in parameters:
        return plain
    return f"{plain}{'&' if '?' in plain else '?'}{_WRITABLE}"


def find_mistake(url: str) -> str | None:
    """What is wrong with a URL, as a clause after its name; None if libpq takes it. Shows no part of the URL."""
    scheme = _SCHEME.match(url)
    if scheme is None:
        return NO_URL
    encode = "in names and passwords write @ as %40, / as %2F, ? as %3F and % as %25"
    before_query, _, query = url[scheme.end() :].partition("?")
    parameters = _parsed(_SCHEME.sub("postgresql://", url, count=1))
    if not parameters and before_query + query:
        return f"is not a URL that libpq can read; check its parameters, and {encode}"
    names = [unquote(part.partition("=")[0]) for part in query.split("&") if part]
    written = [part for part in query.split("&") if unquote(part.partition("=")[0]) == "host"]
    if len(set(names)) < len(names) or any(re.search(r"=[^:/]+:\d+$", host) for host in written):
        return "names hosts in a form that libpq does not know; write postgresql://host1:port1,host2:port2/database"
    hosts, ports = _hosts(parameters), str(parameters.get("port", "")).split(",")
    if "@" in before_query.partition("/")[2] or not all(re.fullmatch(r"\d{0,5}", port) for port in ports):
        return f"has a port that is not a number, or a character that has to be encoded: {encode}"
    if any(port and not 0 < int(port) < 65536 for port in ports):
        return "has a port outside 1 to 65535"
    if len(ports) not in (1, max(1, len(hosts))):
        return "has not as many ports as hosts"
    return None


def without_password(url: str) -> str:
    """The URL for a reader, with `***` for each secret, or as a whole if it is not valid."""
    if find_mistake(url) is not None:
        return "***"
    head, mark, query = _PASSWORD.sub(r"\1:***@", url).partition("?")
    return head + mark + "&".join(map(_without_secret, query.split("&")))


def _without_secret(parameter: str) -> str:
    name, mark, _ = parameter.partition("=")
    is_secret = any(part in unquote(name).lower() for part in _SECRETS)
    return f"{name}{mark}***" if is_secret else parameter


def _parsed(url: str) -> dict[str, object]:
    try:
        return dict(conninfo_to_dict(url))
    except psycopg.ProgrammingError:
        return {}


def _hosts(parameters: dict[str, object]) -> list[str]:
    named = parameters.get("host") or parameters.get("hostaddr")
    return str(named).split(",") if named else []
