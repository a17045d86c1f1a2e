"""What build clients and bots need to know of a door, as the lines of their own configurations."""

from collections.abc import Mapping

from schema.validation import FARM, OF_FARM

#: Client → the name of its file, and its lines. `{host}` is the door's HOST:PORT.
CLIENTS: Mapping[str, tuple[str, str]] = {
    "Bazel": (
        ".bazelrc",
        """build --remote_executor=grpc://{host}
build --remote_cache=grpc://{host}
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
        "recc.conf",
        """server=http://{host}
cas_server=http://{host}
action_cache_server=http://{host}""",
    ),
    "Pants": (
        "pants.toml",
        """[GLOBAL]
remote_execution = true
remote_execution_address = "grpc://{host}"
remote_store_address = "grpc://{host}\"""",
    ),
}


def lines(address: str, *, needs_token: bool) -> str:
    """Return what to write into the files of clients. address: of the door. needs_token: it takes none without."""
    host = address.removeprefix("grpc://")
    parts = [f"# {client}: {file}\n{text.format(host=host)}" for client, (file, text) in CLIENTS.items()]
    if needs_token:
        parts.append(
            "# Every caller needs a token: `leasehold token create submitter --instance NAME`. Bazel sends it by\n"
            'build --remote_header=authorization="Bearer lh_…"'
        )
    parts.append(
        "# A bot that runs actions, on the machine of the door; it needs buildbox-run and bubblewrap.\n"
        f"leasehold bot --name farm-1 --capacity 4 --property {FARM}={OF_FARM} --exclusive {FARM}"
    )
    return "\n\n".join(parts)
