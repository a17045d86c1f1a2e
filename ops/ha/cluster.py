"""Three members with etcd, Patroni and PostgreSQL, and HAProxy before them, run from the templates.

Each member has a machine of its own. HAProxy and everything else of the run stands at the switch, as the processes of a
pool do that stand on machines of their own.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import httpx
import psycopg

from ops.ha.machines import NETWORK, SWITCH, Machine
from schema import clock
from schema.postgres import embedded

T = TypeVar("T")

TEMPLATES = Path(__file__).parent / "templates"
CLUSTER, DATABASE, PROXY_PORT = "leasehold", "leasehold", 5000
#: Seconds within which the cluster must be whole again after any fault, on a busy machine, and between two looks.
WHOLE_WITHIN, LOOK = 300.0, 0.2
_PROGRAMS = ("patroni", "patronictl", "etcd", "haproxy", "ip", "nsenter", "unshare")
#: The command line of Patroni, as `pkill -f` matches it.
_PATRONI = "[p]atroni .*patroni.yml"
_SERVER_PROGRAMS = ("postgres", "initdb", "pg_rewind", "pg_basebackup")


class NotWhole(Exception):
    """The cluster did not come into the awaited state in time."""


def missing() -> list[str]:
    """Say what this machine lacks for a run; nothing if it can run."""
    found = [f"the program {name}" for name in _PROGRAMS if _program(name) is None]
    if server_programs() is None:
        found.append("PostgreSQL's server programs, with pg_rewind, in /usr/lib/postgresql/<version>/bin")
    if os.geteuid() != 0:
        found.append("root, which namespaces of networks need")
    return found


def server_programs() -> Path | None:
    """Return the directory of the newest PostgreSQL installed by Debian's packages that has all programs."""
    for place in sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda place: -int(place.parent.name)):
        if all((place / name).exists() for name in _SERVER_PROGRAMS):
            return place
    return None


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def filled(name: str, values: Mapping[str, object]) -> str:
    """Return a template with all of its variables replaced. Raises KeyError for one that has no value."""
    return Template((TEMPLATES / name).read_text()).substitute(values)


@dataclass(frozen=True)
class Secrets:
    """The passwords of one run."""

    superuser: str
    replication: str
    rewind: str
    rest: str
    owner: str

    @classmethod
    def made(cls) -> "Secrets":
        return cls(*(secrets.token_hex(16) for _ in range(5)))


class Member:
    """A machine with etcd, Patroni and the PostgreSQL server that Patroni runs."""

    def __init__(self, number: int, directory: Path, account: embedded.ServerAccount) -> None:
        self.name = f"db{number}"
        self.machine = Machine(self.name, number)
        self.directory = directory / self.name
        self._account = account
        self._environment = {"PATH": f"{os.environ['PATH']}:/usr/sbin", "LC_ALL": "C.UTF-8"}

    def prepare(self, values: Mapping[str, object]) -> None:
        """Write the configuration."""
        for path in (self.directory, self.directory / "private"):
            path.mkdir(mode=0o700)
            self._account.own(path)
        own = {
            "MEMBER": self.name,
            "ADDRESS": self.machine.address,
            "ETCD_DATA": self.directory / "etcd",
            "DATA": self.directory / "data",
            "PRIVATE": self.directory / "private",
            "ARCHIVE_COMMAND": "/bin/true",
        }
        for name in ("patroni.yml", "etcd.env"):
            path = self.directory / name
            path.write_text(filled(name, {**values, **own}))
            self._account.own(path)

    def start(self) -> None:
        """Switch the machine on and start etcd and Patroni there."""
        self.machine.start()
        lines = (self.directory / "etcd.env").read_text().splitlines()
        etcd = {
            name: value.strip('"') for name, _, value in (each.partition("=") for each in lines if each[:5] == "ETCD_")
        }
        self._run("etcd", {**self._environment, **etcd})
        self._run("patroni", self._environment, str(self.directory / "patroni.yml"))

    def crash_server(self) -> None:
        """SIGKILL to the postmaster alone, as in a crash of PostgreSQL on a sound machine."""
        pid = (self.directory / "data" / "postmaster.pid").read_text().split()[0]  # that of the machine's namespace
        process = self.machine.run(
            ["kill", "-9", pid], environment=self._environment, output=subprocess.DEVNULL, account=None
        )
        if process.wait() != 0:
            raise NotWhole(f"the postmaster of {self.name} was not there")

    def pause_patroni(self) -> None:
        """SIGSTOP to Patroni: PostgreSQL goes on, and nobody watches it."""
        self.machine.signal(signal.SIGSTOP, _PATRONI)

    def resume_patroni(self) -> None:
        """SIGCONT to Patroni."""
        self.machine.signal(signal.SIGCONT, _PATRONI)

    @property
    def is_primary(self) -> bool:
        """Whether Patroni there says that it holds the leader's lock."""
        return self._answers("primary")

    def roles(self) -> list[dict[str, Any]]:
        """Return all members as this one sees them; none if it does not answer."""
        try:
            answer = httpx.get(f"{self.rest}/cluster", timeout=3.0, trust_env=False)
        except httpx.HTTPError:
            return []
        found: list[dict[str, Any]] = answer.json().get("members", []) if answer.status_code == 200 else []
        return found

    @property
    def rest(self) -> str:
        """The address of Patroni's REST."""
        return f"http://{self.machine.address}:8008"

    def _answers(self, path: str) -> bool:
        try:
            return httpx.get(f"{self.rest}/{path}", timeout=3.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def _run(self, program: str, environment: Mapping[str, str], *arguments: str) -> None:
        with (self.directory / f"{program}.log").open("ab") as log:
            self.machine.run([program, *arguments], environment=environment, output=log, account=self._account.uid)


class Cluster:
    """The members and HAProxy. Leaving it ends all of them.

    proxied: the pool reaches the primary through HAProxy; otherwise by a URL that names all members.
    """

    def __init__(self, directory: Path, *, synchronous: bool = True, proxied: bool = True) -> None:
        self.directory = directory
        self.account = embedded.account_for(directory / "none")
        self.secrets = Secrets.made()
        self.members = [Member(number, directory, self.account) for number in (1, 2, 3)]
        self._synchronous, self._proxied = synchronous, proxied
        self._proxy: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        if self._proxy is not None:
            self._proxy.kill()
            self._proxy.wait()
        for member in self.members:
            member.machine.kill()

    @property
    def values(self) -> dict[str, object]:
        """Values of the templates that all members share."""
        addresses = [member.machine.address for member in self.members]
        peers = ",".join(f"{each.name}=http://{each.machine.address}:2380" for each in self.members)
        found: dict[str, object] = {
            "CLUSTER": CLUSTER,
            "NETWORK": NETWORK,
            "ETCD_PEERS": peers,
            "ETCD_HOSTS": ",".join(f"{address}:2379" for address in addresses),
            "PROGRAMS": server_programs(),
            "PROXY": SWITCH,
            "SUPERUSER_PASSWORD": self.secrets.superuser,
            "REPLICATION_PASSWORD": self.secrets.replication,
            "REWIND_PASSWORD": self.secrets.rewind,
            "REST_PASSWORD": self.secrets.rest,
        }
        for number, member in enumerate(self.members, 1):
            found |= {f"MEMBER_{number}": member.name, f"ADDRESS_{number}": member.machine.address}
        return found

    def start(self) -> None:
        """Make the cluster and Leasehold's empty database, and wait until every standby follows."""
        for member in self.members:
            member.prepare(self.values)
            if not self._synchronous:
                path = member.directory / "patroni.yml"
                path.write_text(path.read_text().replace("synchronous_mode: true", "synchronous_mode: false"))
            member.start()
        proxy = self.directory / "haproxy.cfg"
        proxy.write_text(filled("haproxy.cfg", self.values))
        with (self.directory / "haproxy.log").open("ab") as log:
            program = _program("haproxy")
            assert program is not None, "missing() is asked first"
            self._proxy = subprocess.Popen([program, "-db", "-f", str(proxy)], stdout=log, stderr=log)
        self.wait_whole()
        with psycopg.connect(self._url("postgres", self.secrets.superuser, "postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE ROLE leasehold LOGIN PASSWORD '{self.secrets.owner}'")
            connection.execute("GRANT pg_monitor TO leasehold")
            connection.execute(f"CREATE DATABASE {DATABASE} OWNER leasehold")

    @property
    def url(self) -> str:
        """The URL of the pool's database."""
        if not self._proxied:
            return self.url_of(*self.members)
        return self._url("leasehold", self.secrets.owner, DATABASE)

    def connect(self, **arguments: Any) -> psycopg.Connection[Any]:
        """Open a connection to the primary, in autocommit mode."""
        return psycopg.connect(self.url, autocommit=True, connect_timeout=5, **arguments)

    def url_of(self, *members: Member) -> str:
        """The URL of the pool's database at these members, without HAProxy: the one that takes writes is used."""
        hosts = ",".join(f"{member.machine.address}:5432" for member in members)
        wanted = "?target_session_attrs=read-write" if len(members) > 1 else ""
        return f"postgresql://leasehold:{self.secrets.owner}@{hosts}/{DATABASE}{wanted}"

    def _url(self, role: str, password: str, database: str) -> str:
        return f"postgresql://{role}:{password}@{SWITCH}:{PROXY_PORT}/{database}"

    def primary(self) -> Member | None:
        """Return the member that takes writes; None while there is none."""
        return next((member for member in self.members if member.is_primary), None)

    def wait_primary(self, *, other_than: Member | None = None) -> Member:
        """Wait for a primary, and for another one than this if one is given."""

        def found() -> Member | None:
            return next((each for each in self.members if each is not other_than and each.is_primary), None)

        return wait_for(found, "a primary")

    def wait_whole(self) -> None:
        """Wait until one member is primary, all others follow it, and one of them synchronously."""
        wait_for(self._whole, "a primary with two standbys")

    def _whole(self) -> bool:
        primary = self.primary()
        roles = primary.roles() if primary is not None else []
        running = [each for each in roles if each.get("state") in ("running", "streaming")]
        timelines = {each.get("timeline") for each in running}
        synchronous = not self._synchronous or any(each["role"] == "sync_standby" for each in running)
        return len(running) == len(self.members) and len(timelines) == 1 and synchronous

    def switch_over(self) -> Member:
        """Ask Patroni for another primary, as `patronictl switchover` does, and return the new one."""
        primary = self.wait_primary()
        wanted = next((each for each in primary.roles() if each["role"] == "sync_standby"), None)
        message = {"leader": primary.name} | ({"candidate": wanted["name"]} if wanted else {})
        answer = httpx.post(
            f"{primary.rest}/switchover", content=json.dumps(message), auth=("patroni", self.secrets.rest),
            timeout=120.0, trust_env=False,
        )  # fmt: skip
        if answer.status_code != 200:
            raise NotWhole(f"Patroni refused the switchover: {answer.text}")
        return self.wait_primary(other_than=primary)


def wait_for(condition: Callable[[], T | None], what: str, within: float = WHOLE_WITHIN) -> T:
    """Return the first true result of the condition. Raises NotWhole after `within` seconds."""
    give_up = clock.monotonic() + within
    while clock.monotonic() < give_up:
        if found := condition():
            return found
        clock.sleep(LOOK)
    raise NotWhole(f"{what} was not there within {within:.0f} s")
