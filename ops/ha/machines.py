"""Machines of a test network: processes in namespaces of their own, which can lose their power or their network.

A machine is a PID namespace, a mount namespace and a network namespace. The SIGKILL of its first process kills all of
its processes at one instant, as a loss of power does. Its link can be taken off the switch: packets then vanish
without an error, as at a partition. All of it ends with the process that runs the network, and nothing is left behind.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from bots.agent.guardian import descendants, process_tree
from schema import clock

#: The network, and the address of the switch, which the run's own processes use.
NETWORK, SWITCH = "10.77.0.0/24", "10.77.0.254"
_BRIDGE = "switch"
#: The first process of a machine. It collects the children that others have left behind.
_FIRST = "while :; do sleep 1; done"
#: The variable that tells a process that it runs inside.
_INSIDE = "LEASEHOLD_HA_INSIDE"


def enter(module: str, arguments: Sequence[str]) -> None:
    """Start `python -m module` anew in a network and PID namespace of its own, unless this is already there.

    The shell between them is the first process there: it collects orphans, whose ids PostgreSQL would take for living.
    """
    if os.environ.get(_INSIDE):
        _ip("link", "set", "lo", "up")
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{SWITCH}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")
        return
    command = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    command += ["sh", "-c", '"$0" -m "$@"; exit $?', sys.executable, module, *arguments]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})


class Machine:
    """One machine. `address`: its address in the network."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.address = name, f"10.77.0.{number}"
        self._link = f"port{number}"
        self._first: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._entered: list[subprocess.Popen[bytes]] = []

    @property
    def on(self) -> bool:
        """Whether the machine has power."""
        return self._first is not None and self._first.poll() is None

    def start(self) -> None:
        """Switch the machine on, with a network and without any process."""
        if self.on:
            return
        command = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", _FIRST]
        self._first = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._pid = _child(self._first.pid)
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid))
        _ip("link", "set", self._link, "master", _BRIDGE, "up")
        setup = f"ip link set lo up && ip addr add {self.address}/24 dev eth0 && ip link set eth0 up"
        subprocess.run([*self._inside("--net"), "sh", "-c", setup], check=True)

    def kill(self) -> None:
        """Take the power away: every process ends at once. The link goes with the network of the machine."""
        if self._first is not None:
            self._first.kill()
            self._first.wait()
            self._first = None
            for process in self._entered:
                process.send_signal(signal.SIGCONT)  # `nsenter` stops with its child, and does not go on with it
                process.wait()
            self._entered.clear()
            while Path(f"/proc/{self._pid}").exists():  # until the last of its processes has ended
                clock.sleep(0.01)
            subprocess.run(["ip", "link", "del", self._link], check=False, capture_output=True)

    def cut(self) -> None:
        """Take the machine off the switch. It still reaches its own addresses."""
        _ip("link", "set", self._link, "nomaster")

    def mend(self) -> None:
        """Put the machine back on the switch."""
        _ip("link", "set", self._link, "master", _BRIDGE)

    def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes] | int, account: int | None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on the machine, under the account with this number, or as root."""
        switch = [] if account is None else [f"--setuid={account}", f"--setgid={account}"]
        process = subprocess.Popen(
            [*self._inside("--net", "--pid", "--mount", *switch), *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(environment), cwd="/",
        )  # fmt: skip
        self._entered.append(process)
        return process

    def signal(self, number: signal.Signals, program: str) -> None:
        """Send a signal to every process of the machine whose command line names the program."""
        command = ["pkill", f"-{number.name.removeprefix('SIG')}", "-f", program]
        subprocess.run([*self._inside("--pid", "--mount"), *command], check=True)

    def end(self, process: "subprocess.Popen[bytes]") -> None:
        """SIGKILL to a process that `run` has started, and to what it has started on the machine."""
        for child in descendants([process.pid], process_tree()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()

    def _inside(self, *options: str) -> list[str]:
        return ["nsenter", f"--target={self._pid}", *options, "--"]


def _child(parent: int) -> int:
    """The first child of a process, which is there a moment after the start."""
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    give_up = clock.monotonic() + 30.0
    while clock.monotonic() < give_up:
        if found := listed.read_text().split():
            return int(found[0])
        clock.sleep(0.01)
    raise TimeoutError(f"process {parent} has started nothing")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)
