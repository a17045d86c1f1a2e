"""The gateway and the token of a caller: given, or named by the environment, or kept in a data directory.

`Pool.from_env` and the command line read them here. Files are opened only when they are needed.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from leasehold.errors import BadInput
from leasehold.transport import is_local

#: What LEASEHOLD_INSECURE may say.
_YES, _NO = frozenset({"1", "true", "yes", "on", "t", "y"}), frozenset({"", "0", "false", "no", "off", "f", "n"})


def default_data() -> Path:
    """Return the default data directory of `leasehold up`."""
    return Path("/var/lib/leasehold") if os.geteuid() == 0 else Path.home() / ".local/share/leasehold"


@dataclass(frozen=True)
class Credentials:
    """The gateway's address and the caller's token: given here, else by the environment, else by the data directory.

    The address: `url`, LEASEHOLD_URL, `<data>/gateway.url`. The token: the file `token_file`, LEASEHOLD_TOKEN,
    `<data>/operator.token`. The data directory: `data`, LEASEHOLD_DATA, that of `leasehold up`. insecure, or
    LEASEHOLD_INSECURE: a token may be sent unencrypted to another machine.
    """

    url: str | None = None
    token_file: Path | None = None
    data: Path | None = None
    insecure: bool = False

    def address(self) -> str:
        """Return the gateway's URL. Raises BadInput if none is known or if it would send the token unencrypted."""
        url = (self.url or os.environ.get("LEASEHOLD_URL") or self._known_address()).strip()
        if url.startswith("http:") and not is_local(url) and not (self.insecure or self._insecure_environment()):
            clear = "would send the token in clear to another machine"
            raise BadInput(self._named("url"), f"{clear}; use https, or say {self._named('insecure')}")
        return url

    def token(self) -> str:
        """Return the token. Raises BadInput if there is none, or if other users could read its file."""
        given = None if self.token_file is not None else os.environ.get("LEASEHOLD_TOKEN")
        return (given or self._read_token(self.token_file or self._directory() / "operator.token")).strip()

    def _named(self, field: str) -> str:
        """The name of a field in messages; the command line has options instead."""
        return field

    def _directory(self) -> Path:
        return self.data or Path(os.environ.get("LEASEHOLD_DATA") or default_data())

    def _known_address(self) -> str:
        try:
            return (self._directory() / "gateway.url").read_text()
        except (OSError, UnicodeDecodeError):
            ways = f"start `leasehold up`, or give {self._named('url')} or {self._named('data')}"
            if "LEASEHOLD_JOB" in os.environ:
                ways = f"a job has none of its bot's; give {self._named('data')}, see `leasehold help tasks`"
            raise BadInput(self._named("url"), f"no gateway is known in {self._directory()}: {ways}") from None

    def _read_token(self, path: Path) -> str:
        field = self._named("token_file")
        try:
            with path.open() as file:
                mode = os.fstat(file.fileno()).st_mode
                if stat.S_ISREG(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO):
                    raise BadInput(field, f"{path} can be read by others: chmod 600 {path}")
                return file.read(4096)
        except FileNotFoundError:
            raise BadInput(field, f"{path} is not there: give {field} or set LEASEHOLD_TOKEN") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise BadInput(field, f"{path} cannot be read: {reason}") from None

    def _insecure_environment(self) -> bool:
        said = os.environ.get("LEASEHOLD_INSECURE", "").strip().lower()
        if said not in _YES | _NO:
            raise BadInput("LEASEHOLD_INSECURE", "is neither true nor false")
        return said in _YES
