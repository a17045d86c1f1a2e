"""Units for systemd, the proxy of several gateways, and files for containers: their programs take and use them."""

import base64
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from assigner.cli import errors
from assigner.cli.main import cli, sections
from assigner.config import loading
from bots.agent.agent import AgentSettings
from schema.postgres.engine import Database
from schema.timing import Timing
from tests.support.http import JOB, submitted
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool
from tests.support.servers import LEASEHOLD, Bot, Served, serving

ROOT = Path(__file__).parent.parent.parent
UNITS, CONTAINERS = ROOT / "ops" / "systemd", ROOT / "ops" / "container"
PROGRAM = "/opt/leasehold/bin/leasehold"
ANALYZE, SETPRIV = shutil.which("systemd-analyze"), shutil.which("setpriv")
HAPROXY = shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin")


def settings(unit: str) -> dict[str, list[str]]:
    """The settings of a unit, each with its values in order."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_takes_every_unit(tmp_path: Path) -> None:
    assert ANALYZE is not None
    names = []
    for unit in sorted(UNITS.iterdir()):
        # The program has to be there, and a template needs an instance.
        name = unit.name.replace("@.", "@builder-1.")
        (tmp_path / name).write_text(unit.read_text().replace(PROGRAM, sys.executable))
        names.append(tmp_path / name)
    done = subprocess.run([ANALYZE, "verify", "--man=no", *names], capture_output=True, text=True, check=False)
    about_ours = [line for line in done.stderr.splitlines() if "leasehold" in line or str(tmp_path) in line]
    assert (done.returncode, about_ours) == (0, [])


def test_every_command_of_a_unit_is_one_that_the_program_has(capsys: pytest.CaptureFixture[str]) -> None:
    for unit in UNITS.glob("*.service"):
        for command in settings(unit.name)["ExecStart"]:
            program, *arguments = command.replace("%i", "builder-1").replace("%H", "host-1").split()
            assert program == PROGRAM
            assert errors.run(cli, [*arguments, "--help"]) == 0, f"{unit.name}: {capsys.readouterr().err}"


def test_a_unit_waits_for_a_drain_before_it_kills() -> None:
    bot = settings("leasehold-bot@.service")
    assert bot["KillMode"] == ["mixed"]
    assert int(bot["TimeoutStopSec"][0]) > AgentSettings().drain_seconds + AgentSettings().kill_grace


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up capabilities and keep others")
@pytest.mark.skipif(SETPRIV is None, reason="setpriv is not installed")
def test_an_agent_works_with_the_capabilities_that_its_unit_leaves(served: Served, pool: Pool, scratch: Path) -> None:
    (kept,) = settings("leasehold-bot@.service")["CapabilityBoundingSet"]
    bounds = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in kept.split())])
    (token := scratch / "bot.token").write_text(served.token("bot", bot="*"))
    token.chmod(0o600)
    (scratch / "work").mkdir(mode=0o711)
    command = [SETPRIV, "--bounding-set", bounds, "--inh-caps=-all", "--no-new-privs", LEASEHOLD]
    command += ["--data", scratch, "bot", "--name", "builder-1", "--url", served.url, "--token-file", token]
    environment = {**os.environ, "LEASEHOLD_BOT_WORK_DIR": str(scratch / "work"), "LEASEHOLD_CONFIG": os.devnull}
    log = scratch / "bot.log"
    with log.open("wb") as output:
        bot = subprocess.Popen(list(map(str, command)), env=environment, stderr=output, stdout=output)
    try:
        with served.client(served.token("operator")) as operator:
            # The files of a command belong to its account, without permissions for anybody; the agent removes them.
            script = "id -u; mkdir closed; echo x > closed/file; chmod 000 closed; sleep 3600 & disown; true"
            done, stopped = submitted(
                operator,
                JOB | {"command": ["bash", "-c", script]},
                JOB | {"command": ["sleep", "3600"], "timeout_seconds": 1.0},
            )

            def states() -> list[str]:
                pool.assigner().run_once()
                return [operator.get(f"/v1/jobs/{job}").json()["state"] for job in (done, stopped)]

            eventually(lambda: states() == ["succeeded", "failed"], MINUTE)
            printed = base64.b64decode(operator.get(f"/v1/jobs/{done}/output").json()["data"])
            assert int(printed.split()[0]) != 0
            eventually(lambda: not [*(scratch / "work").glob("**/closed")], MINUTE)
        bot.send_signal(signal.SIGTERM)
        assert bot.wait(MINUTE) == 0, log.read_text()
        assert re.search("stopped .*exit_code.{0,9}=.{0,9}0", log.read_text())
    finally:
        bot.kill()
        bot.wait()


# Several gateways behind HAProxy


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed")
def test_the_proxy_leads_to_the_gateways_that_are_ready(
    database: Database, timing: Timing, port: int, tmp_path: Path
) -> None:
    assert HAPROXY is not None
    with serving(database, timing) as one, serving(database, timing) as two:
        text = (ROOT / "ops" / "haproxy" / "haproxy.cfg").read_text()
        text = text.replace(":7410 ssl crt /etc/haproxy/leasehold.pem", f"127.0.0.1:{port}").replace(
            "maxconn 40000", "maxconn 100"
        )
        for served, place in ((one, "127.0.0.1:7411"), (two, "127.0.0.1:7412")):
            assert text.count(place) == 1
            text = text.replace(place, urlsplit(served.url).netloc)
        (path := tmp_path / "haproxy.cfg").write_text(text)
        checked = subprocess.run([HAPROXY, "-c", "-f", path], capture_output=True, text=True, check=False)
        assert (checked.returncode, [line for line in checked.stderr.splitlines() if "WARNING" in line]) == (0, [])
        with subprocess.Popen([HAPROXY, "-f", path]) as proxy, ThreadPoolExecutor() as threads:
            try:
                url = f"http://127.0.0.1:{port}"
                behind = Served(url, one.app, one.server, database)
                with httpx.Client(base_url=url, trust_env=False, timeout=MINUTE) as http:
                    eventually(lambda: is_ready(http))
                    bots = [Bot(behind, name=f"b{number}") for number in range(4)]
                    held = [threads.submit(bot.sync, wait=60) for bot in bots]
                    eventually(lambda: one.waits("bots") == two.waits("bots") == 2)
                    one.server.stop()
                    # Held calls are answered at once, and the next ones come to the other gateway.
                    eventually(lambda: sum(call.done() for call in held) == 2)
                    eventually(lambda: all(is_ready(http) for _ in range(10)))
                    two.server.stop()
                    assert [call.result(MINUTE).status_code for call in held] == [200] * 4
            finally:
                proxy.terminate()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


# Containers: the same processes, with the same capabilities


def test_the_containerfile_copies_files_that_there_are_and_all_that_the_wheel_has() -> None:
    copied = {
        source
        for line in (CONTAINERS / "Containerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert [source for source in copied if not (ROOT / source).exists()] == []
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"]} <= copied


def test_the_compose_file_runs_commands_and_sets_variables_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    # The runtime puts variables of its own environment in; a password is such a one.
    text = re.sub(r"\$\{\w+[^}]*\}", "secret", (CONTAINERS / "compose.yaml").read_text())
    services = yaml.safe_load(text)["services"]
    ours = {name: service for name, service in services.items() if service["image"] == "leasehold"}
    assert {*ours} == {"upgrade", "gateway", "assigner", "bot"}
    of_callers = {"LEASEHOLD_URL", "LEASEHOLD_TOKEN", "LEASEHOLD_INSECURE"}
    for name, service in ours.items():
        assert errors.run(cli, [*service["command"], "--help"]) == 0, f"{name}: {capsys.readouterr().err}"
        given = {key: str(value) for key, value in service["environment"].items() if key not in of_callers}
        loading.load(None, sections(), given)
    (kept,) = settings("leasehold-bot@.service")["CapabilityBoundingSet"]
    assert ours["bot"]["cap_drop"] == ["ALL"]
    assert {f"CAP_{name}" for name in ours["bot"]["cap_add"]} == {*kept.split()}
    assert int(ours["bot"]["stop_grace_period"].removesuffix("s")) > AgentSettings().drain_seconds
