"""The gateway and the token of the caller's commands: the options, variables and files that name them."""

import os
import random
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
from leasehold.client import Client
from leasehold.errors import BadInput
from leasehold.transport import is_local

P = ParamSpec("P")
R = TypeVar("R")


def default_data() -> Path:
    """Return the default data directory of `leasehold up`."""
    return Path("/var/lib/leasehold") if os.geteuid() == 0 else Path.home() / ".local/share/leasehold"


@dataclass(frozen=True)
class Caller:
    """The gateway's address and the caller's token: from options, else the environment, else the data directory.

    The address: `--url`, LEASEHOLD_URL, `<data>/gateway.url`. The token: `--token-file`, LEASEHOLD_TOKEN,
    `<data>/operator.token`. A token is never an argument, because other users of the machine can read arguments.
    """

    url: str | None = None
    token_file: Path | None = None
    data: Path | None = None
    insecure: bool = False
    json: bool = False

    def client(self, *, patience: float = 30.0) -> Client:
        """Make a client for that gateway. Raises BadInput or Unauthorised if the address or the token is unknown."""
        return Client(self.address(), self.token(), chance=random.SystemRandom(), patience=patience)

    def address(self) -> str:
        """Return the gateway's URL. Raises BadInput if none is known or if it would send the token unencrypted."""
        url = (self.url or os.environ.get("LEASEHOLD_URL") or self._known_address()).strip()
        if url.startswith("http:") and not is_local(url) and not self.insecure:
            raise BadInput("--url", "would send the token in clear to another machine; use https, or say --insecure")
        return url

    def token(self) -> str:
        """Return the token. Raises BadInput if there is none, or if other users could read it."""
        given = None if self.token_file is not None else os.environ.get("LEASEHOLD_TOKEN")
        return (given or _read_token(self.token_file or self._directory() / "operator.token")).strip()

    def _known_address(self) -> str:
        try:
            return (self._directory() / "gateway.url").read_text()
        except (OSError, UnicodeDecodeError):
            raise BadInput(
                "--url", f"no gateway is known in {self._directory()}: start `leasehold up`, or give --url or --data"
            ) from None

    def _directory(self) -> Path:
        return self.data or default_data()


def _data_of_the_program() -> Path | None:
    """Return the data directory given before the command's name, or in the environment."""
    given = click.get_current_context().find_root().params.get("data") or os.environ.get("LEASEHOLD_DATA")
    return Path(given) if given else None


def _read_token(path: Path) -> str:
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise BadInput("--token-file", f"{path} can be read by others: chmod 600 {path}")
            return file.read(4096)
    except FileNotFoundError:
        raise BadInput("--token-file", f"{path} is not there: give --token-file or set LEASEHOLD_TOKEN") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInput("--token-file", f"{path} cannot be read: {reason}") from None


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
    @click.option("--insecure", is_flag=True, help="Allow http:// to another machine.", envvar="LEASEHOLD_INSECURE")
    @click.option("--json", "json", is_flag=True, help="Print JSON instead of a table.")
    @wraps(command)
    def with_caller(*args: Any, **options: Any) -> R:
        names = ("url", "token_file", "data", "insecure", "json")
        caller = Caller(**{name: options.pop(name) for name in names})
        if caller.data is None:
            caller = replace(caller, data=_data_of_the_program())
        return command(caller, *args, **options)

    return with_caller
