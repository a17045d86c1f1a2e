"""What build clients and bots need to know of a door, as the lines of their own configurations."""

from collections.abc import Iterator, Mapping

from bots.farm.settings import FarmSettings
from schema.validation import FARM, OF_FARM

#: Client → the name of its file, and its lines. `{host}` is the door's HOST:PORT; `{s}` is "s" with TLS.
CLIENTS: Mapping[str, tuple[str, str]] = {
    "Bazel": (
        ".bazelrc",
        """build --remote_executor=grpc{s}://{host}
build --remote_cache=grpc{s}://{host}
build --spawn_strategy=remote
build --remote_retries=10""",
    ),
    "Bazel before 0.29": (
        ".bazelrc",
        """build --remote_executor={host}
build --remote_cache={host}
build --spawn_strategy=remote --genrule_strategy=remote
build --strategy=CppCompile=remote --strategy=CppLink=remote --strategy=Javac=remote
build --remote_retries=10""",
    ),
    "recc": (
        "~/.recc/recc.conf",
        """server=http{s}://{host}
cas_server=http{s}://{host}
action_cache_server=http{s}://{host}
retry_limit=8
retry_delay=250""",
    ),
    "Pants": (
        "pants.toml",
        """[GLOBAL]
remote_execution = true
remote_execution_address = "grpc{s}://{host}"
remote_store_address = "grpc{s}://{host}\"""",
    ),
}
#: The same for more lines: with TLS, where callers need a certificate, and where they need a token.
_TLS: Mapping[str, str] = {
    "Bazel": "build --tls_certificate=ca.pem",
    "Bazel before 0.29": "build --tls_enabled --tls_certificate=ca.pem",
    "recc": "# GRPC_DEFAULT_SSL_ROOTS_FILE_PATH=ca.pem in the environment",
    "Pants": 'remote_ca_certs_path = "ca.pem"',
}
_CERTIFICATE: Mapping[str, str] = {
    "Bazel": "build --tls_client_certificate=client.pem --tls_client_key=client.key",
    "Bazel before 0.29": "# It shows no certificate, so this door refuses it.",
    "recc": "# It shows no certificate, so this door refuses it.",
    "Pants": 'remote_client_certs_path = "client.pem"\nremote_client_key_path = "client.key"',
}
_TOKEN: Mapping[str, str] = {
    "Bazel": 'build --remote_header=authorization="Bearer lh_…"',
    "Bazel before 0.29": "# It sends no token, so this door refuses it.",
    "recc": "access_token_path=token.txt",
    "Pants": 'remote_oauth_bearer_token_path = "token.txt"',
}
#: The command of a worker of the Remote Workers API.
WORKER = """buildbox-worker --bots-remote=http{s}://{host} --cas-remote=http{s}://{host} \\
  --buildbox-run=/usr/bin/buildbox-run-bubblewrap --runner-arg=--disable-localcas \\
  --runner-arg=--bind-mount=/usr:/usr --runner-arg=--bind-mount=/bin:/bin --runner-arg=--bind-mount=/lib:/lib \\
  --runner-arg=--bind-mount=/lib64:/lib64 --platform=OSFamily=linux --platform=ISA=x86-64 --concurrent-jobs=4 \\
  --bots-retry-limit=12 --cas-retry-limit=12{keys} w1"""


def lines(address: str, settings: FarmSettings) -> str:
    """Return what to write into the files of clients. address: of the door, whose settings these are."""
    return "\n\n".join(_parts(address, settings))


def _parts(address: str, settings: FarmSettings) -> Iterator[str]:
    scheme, _, host = address.partition("://")
    secure = scheme == "grpcs"
    needs_certificate = settings.tls_client_ca is not None
    needs_token = settings.anonymous is None and not needs_certificate
    for client, (file, text) in CLIENTS.items():
        told = [f"# {client}: {file}", text.format(host=host, s="s" if secure else "")]
        told += [_TLS[client]] if secure else []
        told += [_CERTIFICATE[client]] if needs_certificate else []
        told += [_TOKEN[client]] if needs_token and (secure or client != "recc") else []
        yield "\n".join(told)
    if secure:
        yield "# ca.pem: the authorities of the door's certificate, where clients do not know them already."
    if needs_token:
        yield "# lh_…, and token.txt: what `leasehold token create submitter --instance NAME` prints."
        if not secure:
            yield "# recc sends a token with TLS only."
    where = "It" if not settings.is_local else "On the machine of the door; it"
    files = (settings.bots_ca, settings.bots_token_file, settings.bots_cert, settings.bots_key)
    told = [
        f"# A bot that runs actions. {where} needs buildbox-run and bubblewrap.",
        *(
            f"# Its machine needs the file {each}, and accounts of jobs must be able to read it."
            for each in files
            if each
        ),
        f"leasehold bot --name farm-1 --capacity 4 --property {FARM}={OF_FARM} --exclusive {FARM}",
    ]
    if not settings.is_local and needs_token and settings.bots_token_file is None:
        told.insert(1, "# Its runner is not known to this door: set farm.bots_token_file.")
    yield "\n".join(told)
    yield _worker(settings, host=host, secure=secure)


def _worker(settings: FarmSettings, *, host: str, secure: bool) -> str:
    told = ["# A worker of the Remote Workers API instead. Give its service Restart=always."]
    keys = ""
    if secure and settings.tls_client_ca is not None:
        keys = "".join(f" --{each}-client-cert=w.crt --{each}-client-key=w.key" for each in ("bots", "cas"))
    elif secure:
        told.append("# worker.txt: what `leasehold token create bot --bot 'w*'` prints.")
        keys = "".join(f" --{each}-access-token=worker.txt" for each in ("bots", "cas"))
    elif not settings.anonymous_workers:
        told.append(
            "# It sends a token with TLS only. On the door's machine, farm.anonymous_workers takes it without one."
        )
    if secure:
        keys += "".join(f" --{each}-server-cert=ca.pem" for each in ("bots", "cas"))
    told.append(WORKER.format(host=host, s="s" if secure else "", keys=keys))
    return "\n".join(told)
