"""What the caller's commands are told first: the gateway and the token, by options, variables and files, and jobs.

Ids of jobs are whole, or in short as lists show them, or the words @last and @failed. The gateway looks up what is not
whole, with the caller's rights. Nothing is asked about whole ids.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
from leasehold import wire
from leasehold.client import Client
from leasehold.credentials import Credentials
from leasehold.errors import BadInput

from schema.readable import NAMES_OF_JOBS, is_name_of_job

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Caller(Credentials):
    """The gateway's address and the caller's token, from options first.

    A token is never an argument, because other users of the machine can read arguments.
    """

    json: bool = False

    def client(self, *, patience: float = 30.0) -> Client:
        """Make a client for that gateway. Raises BadInput or Unauthorised if the address or the token is unknown."""
        return Client(self.address(), self.token(), chance=random.SystemRandom(), patience=patience)

    def _named(self, field: str) -> str:
        return f"--{field.replace('_', '-')}"


def _data_of_the_program() -> Path | None:
    """Return the data directory given before the command's name."""
    given = click.get_current_context().find_root().params.get("data")
    return Path(given) if given else None


def caller_options(command: Callable[Concatenate[Caller, P], R]) -> Callable[P, R]:
    """Add the shared options to a command, which receives them as one Caller in its first argument."""

    @click.option("--url", metavar="URL", help="The gateway [env LEASEHOLD_URL; default: <data>/gateway.url].")
    @click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        help="File with the token, mode 600 [env LEASEHOLD_TOKEN holds a token; default: <data>/operator.token].",
    )
    @click.option(
        "--data",
        type=click.Path(path_type=Path),
        help="Data directory of a local pool [env LEASEHOLD_DATA; default: ~/.local/share/leasehold, "
        "for root /var/lib/leasehold].",
    )
    @click.option("--insecure", is_flag=True, help="Allow http:// to another machine.")
    @click.option("--json", "json", is_flag=True, help="Print JSON instead of a table.")
    @wraps(command)
    def with_caller(*args: Any, **options: Any) -> R:
        names = ("url", "token_file", "data", "insecure", "json")
        caller = Caller(**{name: options.pop(name) for name in names})
        if caller.data is None:
            caller = replace(caller, data=_data_of_the_program())
        return command(caller, *args, **options)

    return with_caller


def whole_ids(client: Client, given: Sequence[str]) -> list[str]:
    """Return the whole ids, each once. Raises BadInput and NotFound for what names no single job."""
    names = [each for each in dict.fromkeys(given) if not _is_whole(each)]
    for name in names:
        if not is_name_of_job(name):
            raise BadInput("id", f"'{wire.escaped(name, 80)}' is not the id of a job: {NAMES_OF_JOBS}")
    found: dict[str, str] = {}
    for start in range(0, len(names), wire.MAX_NAMES):
        part = names[start : start + wire.MAX_NAMES]
        found |= zip(part, client.call("POST", "/v1/jobs/find", body={"names": part})["ids"], strict=True)
    return list(dict.fromkeys(found.get(each, each) for each in given))


def whole_id(client: Client, given: str) -> str:
    """Return the whole id of one job. Raises as `whole_ids`."""
    return whole_ids(client, [given])[0]


def _is_whole(given: str) -> bool:
    try:
        uuid.UUID(given)
    except ValueError:
        return False
    return True
