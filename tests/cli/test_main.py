"""The console script: exit codes, the one line on standard error, JSON on standard output."""

import contextlib
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import click
import pytest
import structlog
from leasehold.errors import BadInput, Conflict, Forbidden, LeaseholdError, NotFound, NotReady, QueueFull, Unauthorised
from leasehold.wire import escaped
from pydantic import BaseModel

from assigner.cli import errors, mistakes, operator, up
from assigner.cli.main import cli, sections
from assigner.config import keys, loading
from assigner.settings import Installation, PoolSettings
from bots.cli import backlog, jobs, listing, submit
from schema import readable
from schema.diagnostics import invariants
from schema.postgres import embedded, urls
from schema.postgres.engine import Database
from schema.requests import JobRequest
from schema.tenancy import tokens
from tests.support.http import Gateway, in_turn, problem
from tests.support.patience import MINUTE
from tests.support.servers import LEASEHOLD, Console

SAMPLE = Path(__file__).parent.parent.parent / "ops" / "leasehold.toml"
JOB = "6b1f6c1e-4a53-4f6b-9a53-8f2f7d1f0001"


@pytest.fixture
def refused(
    stands: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What a command says that is refused before anything is done or sent, in this process: another takes seconds."""
    for name in [name for name in os.environ if name.startswith("LEASEHOLD_")]:
        if name not in ("LEASEHOLD_URL", "LEASEHOLD_TOKEN"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LEASEHOLD_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    # What a program sets up for itself would outlive it here.
    monkeypatch.setattr(structlog, "configure", lambda **_: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)

    def call(*arguments: str) -> str:
        assert errors.run(cli, arguments) == 2, arguments
        said = capsys.readouterr()
        assert (said.out, stands.asked) == ("", [])
        assert re.fullmatch(r"error: [^\n]+\n", said.err), said.err
        return said.err.removeprefix("error: ").rstrip("\n")

    return call


@pytest.fixture
def console(tmp_path: Path, leasehold: Path) -> Console:
    """Without a database."""
    return Console(tmp_path, leasehold)


@pytest.fixture
def connected(tmp_path: Path, leasehold: Path, database_url: str) -> Console:
    return Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=database_url)


#: A line of arguments, and how the line begins that refuses it.
WRONG = [
    ("nothing", "there is no command 'nothing'"),
    ("db statsu", "there is no command 'db statsu'; did you mean 'status'?"),
    ("rule windw set", "there is no command 'rule windw'; did you mean 'window'?"),
    ("bot list", "there is no command 'bot list'; did you mean `leasehold bots list`?"),
    (
        "audit list",
        "there is no command 'audit': the audit is on the console's page Health and in GET /v1/audit; "
        "`leasehold help operations` has a query",
    ),
    ("retry 5", "there is no command 'retry'; did you mean `leasehold requeue`?"),
    ("schedule set nightly", "there is no command 'schedule set'; did you mean `leasehold schedule add`?"),
    ("schedule add", "NAME: is missing, as in: `leasehold schedule add nightly --cron '0 3 * * *' -- make nightly`"),
    ("class-limit set random 2", "'class-limit' is now `leasehold limit class`"),
    ("quota owner ci ann 2", "'quota owner' is now `leasehold limit owner set`"),
    ("help class-limit", "TOPIC: 'class-limit' is now `leasehold limit class`"),
    ("running", "there is no command 'running'; did you mean `leasehold list --state running`?"),
    ("bots undrain b1", "there is no command 'bots undrain'; did you mean `leasehold bots drain --undo`?"),
    ("--verbose", "there is no option '--verbose'"),
    ("token list --data pool", "--data: goes before the command, as in 'leasehold --data … token list'"),
    ("submit --mem 512 -- true", "--mem: is --resource memory_mib=512 here"),
    ("list --stat queued", "there is no option '--stat'; did you mean '--state'?"),
    ("submit --on-conflict jion true", "--on-conflict: 'jion' is not one of 'join', 'replace', 'refuse'; did you mean"),
    ("list --columns id,comand", "--columns: there is no column 'comand'; did you mean 'command'?"),
    ("list label:build", "'label:build' is more than this command takes: filters are options, such as --label build"),
    ("instance set a --create", "--create: is not needed: this command makes an instance that is not there"),
    ("up --bots many", "--bots: 'many' is not a whole number"),
    ("up --bots -1", "--bots: must be greater than or equal to 0"),
    ("up --port 70000", "--port: must be less than or equal to 65535"),
    ("token create king", "KIND: 'king' is not one of 'submitter', 'bot', 'operator'"),
    ("token create", "KIND: is missing"),
    ("token create bot --expires-in soon", "--expires-in: 'soon' is not a duration"),
    ("token create bot --expires-in nan", "--expires-in: 'nan' is not a duration"),
    ("token create bot --property os", "--property: 'os' is not KEY=VALUE"),
    ("bot --capacity 0", "--capacity: must be greater than or equal to 1"),
    ("bot --concurrency 2", "--concurrency: means nothing without --app"),
    ("bot --app a:b --concurrency 2 --capacity 2", "--concurrency: means the same"),
    ("bot --app a:b --concurrency 0", "--concurrency: must be greater than or equal to 1"),
    ("bot --app shop", "--app: 'shop' is not of the form MODULE:POOL, such as shop:pool"),
    ("bot --app shop.py:pool", "--app: 'shop.py:pool' names a file: write MODULE:POOL, such as shop:pool"),
    ("bot --pool a --instance b", "--pool: pool means nothing together with instance"),
    ("bot --name 'Not A Name'", "--name: is not a name: use a-z"),
    ("--config none.toml config check", "none.toml: cannot be read: No such file or directory"),
    ("--data /nonexistent db url", "--data: /nonexistent is not there; `leasehold up` makes it"),
    ("config example ledgerhold.toml", "FILE: 'ledgerhold.toml' is not one of leasehold.toml, prometheus/"),
    ("--data /etc/hostname db status", "--data: Directory '/etc/hostname' is a file."),
    ("submit", "give exactly one of: a command after --, or --file"),
    ("submit --file - -- true", "give exactly one of: a command after --, or --file"),
    ("submit --file /nowhere/jobs.jsonl", "--file: '/nowhere/jobs.jsonl': No such file or directory"),
    ("submit --colour red -- true", "there is no option '--colour'"),
    ("submit --unique-for 1h -- true", "--unique-for: means nothing without --dedup-key"),
    ("submit --retry-policy fator=2 -- true", "--retry-policy: there is no 'fator'; did you mean 'factor'?"),
    ("submit --timeout nan true", "--timeout: "),
    ("submit --env =x -- true", "--env: "),
    ("submit --instance 'Not A Name' -- true", "--instance: "),
    ("submit -- \udcff", "command: "),
    ("submit --resource cpu_milli=half true", "--resource: 'cpu_milli=half' is not KIND=AMOUNT"),
    ("submit --preferred-hour 24 true", "--preferred-hour: must be less than or equal to 23"),
    ("submit --preferred-zone Mars true", "--preferred-zone: 'Mars' is not a time zone"),
    ("submit --preferred-zone UTC true", "--preferred-zone: means nothing without --preferred-hour"),
    ("submit --resource memory_mib=1 --resource memory_mib=2 true", "--resource: names 'memory_mib' twice"),
    ("submit --resource cpu=4 true", "--resource: there is no 'cpu': take cpu_milli, "),
    ("submit --lock 'a b' true", "--lock: is neither a lock nor LOCK:SLOTS"),
    ("submit --user-priority 11 true", "--user-priority: must be less than or equal to 10"),
    ("submit --graph-priority 0 true", "--graph-priority: must be greater than or equal to 1"),
    ("submit --units 2000000 true", "--units: must be less than or equal to 1000000"),
    ("list --min-priority 1001", "--min-priority: must be less than or equal to 1000"),
    ("list --meta", "--meta: needs a value"),
    ("list --json=yes", "--json: takes no value"),
    ("submit --urgency 90 true", "--urgency: is now --priority, which is 100 - urgency"),
    ("submit --deadline 0 true", "--deadline: must be greater than 0"),
    ("show", "ID: is missing"),
    ("show x", "id: "),
    (f"wait {JOB} x", "id: "),
    ("wait", "give either ids, or --all with a filter such as --meta"),
    ("logs ''", "id: "),
    (f"show --watch {JOB}", "--watch: "),
    ("list --watch 0", "--watch: must be greater than or equal to 0.1"),
    ("status --watch=nan", "--watch: 'nan' is no number of seconds"),
    ("list --state asleep", "--state: "),
    ("cancel", "give either ids, or --all with a filter"),
    ("cancel ../bots", "id: "),
    ("bots drain", "NAME: is missing"),
    ("bots drain ../x", "NAME: "),
    ("graph submit /nowhere/graph.json", "FILE: '/nowhere/graph.json': No such file or directory"),
    ("graph list --limit 101", "--limit: "),
    ("graph show", "ID: is missing"),
]


def test_wrong_arguments_give_one_line_and_exit_2_and_nothing_is_sent(refused: Callable[..., str]) -> None:
    told = {line: refused(*shlex.split(line)) for line, _ in WRONG}
    wrong = [(line, told[line]) for line, said in WRONG if not told[line].startswith(said)]
    assert wrong == []
    assert "".join(told.values()).isprintable()


def test_no_option_takes_a_token() -> None:
    for command in (submit.submit, *jobs.COMMANDS, *listing.COMMANDS, *backlog.COMMANDS):
        assert "--token" not in {name for parameter in command.params for name in parameter.opts}


def test_a_wrong_file_or_variable_is_refused_by_every_command_that_reads_it(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "leasehold.toml"
    file.write_text("[timing]\n\nttll = 30\n")
    for command in (["config", "show"], ["db", "status"], ["assign"], ["gateway"], ["bot"], ["up"]):
        said = refused(*command)
        assert said == "leasehold.toml:3: timing.ttll: is not a setting; did you mean 'ttl'?"
    file.write_text("[database]\npool = 3\nurl = 'mysql://me:hunter2@host/x'\n")
    assert refused("db", "status") == "leasehold.toml:3: database: url must be a postgresql:// URL or 'embedded'"
    monkeypatch.setenv("LEASEHOLD_GATEWAY_PROT", "1")
    said = "LEASEHOLD_GATEWAY_PROT: is not a setting; did you mean 'LEASEHOLD_GATEWAY_PORT'?"
    assert refused("config", "check") == said


def test_an_address_of_metrics_without_a_port_is_refused(refused: Callable[..., str]) -> None:
    for command in ("assign", "farm"):
        said = refused(command, "--metrics-host", "0.0.0.0")
        assert said == "--metrics-host: serves nothing without --metrics-port"


def test_configuration_is_shown_without_passwords(console: Console) -> None:
    (console.directory / "leasehold.toml").write_text("[database]\nurl = 'postgresql://me:hunter2@host/x'\n")
    shown = json.loads(console.good("config", "show", "--json"))
    assert shown["database"]["url"] == "postgresql://me:***@host/x"
    assert shown["assigners"][0]["batch"] == 2000
    assert "hunter2" not in console.good("config", "show")


def test_the_example_configuration_is_printed_even_where_the_file_in_use_is_wrong(console: Console) -> None:
    (console.directory / "leasehold.toml").write_text("[timing]\nttll = 30\n")
    printed = console.good("config", "example")
    assert printed == SAMPLE.read_text()
    (console.directory / "leasehold.toml").write_text(printed)
    assert json.loads(console.good("config", "check", "--json"))["ok"]


def test_every_folder_of_examples_is_listed_and_in_the_wheel(console: Console) -> None:
    listed = json.loads(console.good("config", "example", "--list", "--json"))
    assert set(listed) == {
        "leasehold.toml",
        *(
            file.relative_to(SAMPLE.parent).as_posix()
            for folder in operator.EXAMPLE_FOLDERS
            for file in (SAMPLE.parent / folder).rglob("*")
            if file.is_file()
        ),
    }
    for name, path in listed.items():
        assert console.good("config", "example", name) == Path(path).read_text()
    build = tomllib.loads((SAMPLE.parent.parent / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = {f"ops/{name}": f"assigner/examples/{name}" for name in ("leasehold.toml", *operator.EXAMPLE_FOLDERS)}
    assert build["targets"]["wheel"]["force-include"].items() >= wheel.items()


def test_check_says_which_term_can_dominate_and_warns_when_capacity_can_outweigh_priority(console: Console) -> None:
    said = (
        "assigners[0].strategy.weights: one step of bot priority (10) outweighs a locality hit (5); "
        "free capacity outweighs it from 11 more free units on"
    )
    assert console.good("config", "check").splitlines() == [said, "the defaults: ok"]
    assert json.loads(console.good("config", "check", "--json"))["notes"] == [said]
    (console.directory / "leasehold.toml").write_text("[bot]\ncapacity = 11\n")
    done = console.run("config", "check")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "leasehold.toml: ok")
    warned = "warning: leasehold.toml: assigners[0].strategy.weights: free capacity can outweigh bot priority"
    assert done.stderr.startswith(warned)
    for settings, warnings in (
        ({"bot": {"capacity": 10}}, 0),
        ({"bot": {"capacity": 1000}, "assigners": [{"strategy": {"capacity_term": "normalised"}}]}, 0),
        ({"assigners": [{"strategy": {"capacity_term": "normalised", "weights": {"capacity": 11.0}}}]}, 1),
    ):
        assert len(mistakes.mistakes(sections().model_validate(settings))) == warnings


@pytest.mark.parametrize(
    ("commands", "tasks", "said"),
    [
        ("jobs run as root", "tasks run as root", ["jobs run as root"]),
        ("each job has an account", "tasks run as root", ["each job has an account", "tasks run as root"]),
        (None, "tasks run as root", ["tasks run as root"]),
        ("jobs run as root", None, ["jobs run as root"]),
        (None, None, []),
    ],
)
def test_up_says_once_what_commands_and_tasks_alike_can_reach(
    commands: str | None, tasks: str | None, said: list[str]
) -> None:
    settings = SimpleNamespace(job_reach=commands, task_reach=tasks)
    told = up._reach(cast(PoolSettings, settings), commands=True, tasks=True)
    assert told == [line for each in said for line in (f"{each.capitalize()}; see `leasehold help security`", "")]


def test_the_sentences_of_up_fold_on_a_narrow_terminal_and_what_is_to_be_copied_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    copied = "  export LEASEHOLD_DATA=/a/long directory"
    with redirect_stdout(Terminal()) as shown:
        up._greet(["Jobs run as root: they can read its files", "", copied])
    assert shown.getvalue().splitlines() == ["Jobs run as root: they can", "read its files", "", copied]


def test_the_sample_is_the_defaults_and_names_every_setting(console: Console) -> None:
    assert loading.load(SAMPLE, sections(), {}) == sections()()
    assert console.good("config", "check", str(SAMPLE)).splitlines()[-1] == f"{SAMPLE}: ok"
    # Keys that are unset stand in the sample as comments: set them, and all must be there.
    text = re.sub(r"^# (?=[a-z_]+ = |\[\[[a-z.]+\]\]$)", "", SAMPLE.read_text(), flags=re.MULTILINE)
    named = {tuple(step for step in path if isinstance(step, str)) for path in keys.lines(text)}
    assert set(settings_of(sections())) - named == set()


def settings_of(annotation: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All keys. Those of a job are the fields of a submit, which the sample does not repeat."""
    for name, inner in keys.fields(annotation).items():
        below = keys.item(inner) or inner
        models = [each for each in keys.members(below) if isinstance(each, type) and issubclass(each, BaseModel)]
        if models and JobRequest not in models:
            yield from settings_of(below, (*path, name))
        else:
            yield (*path, name)


def test_a_database_that_is_away_gives_exit_3_and_says_why(console: Console) -> None:
    environ = {"LEASEHOLD_DATABASE_URL": "postgresql://me:hunter2@127.0.0.1:1/x"}
    environ["LEASEHOLD_DATABASE_OUTAGE_SECONDS"] = "0"
    for command in (["db", "status"], ["assign"], ["gateway"]):
        said = console.refused(*command, code=3, environ=environ)
        assert said.startswith("the database cannot be reached: connection")
        assert "hunter2" not in said


def test_a_database_of_another_version_gives_exit_3(tmp_path: Path, leasehold: Path, empty_url: str) -> None:
    console = Console(tmp_path, leasehold, LEASEHOLD_DATABASE_URL=empty_url)
    for command in (["assign"], ["gateway"], ["db", "verify"], ["token", "list"]):
        said = console.refused(*command, code=3)
        assert re.fullmatch(r"schema none, need \d{4}; run: leasehold db upgrade", said)
    done = console.run("db", "status", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["ready"] is False

    using, said = console.good("db", "upgrade").splitlines()
    assert using.endswith("; configuration none")
    assert re.fullmatch(r"schema (\d{4}), need \1", said)
    assert json.loads(console.good("db", "status", "--json"))["ready"] is True


def test_commands_name_the_file_and_the_database_without_its_password(console: Console, database_url: str) -> None:
    file = console.directory / "leasehold.toml"
    file.write_text(f"[database]\nurl = {json.dumps(database_url)}\n")
    for command in (["db", "status"], ["db", "upgrade"], ["db", "verify"], ["config", "show"]):
        first = console.good(*command).splitlines()[0].removeprefix("# ")
        assert first == f"database {urls.without_password(database_url)}; configuration {file}"
    file.write_text("[database]\nurl = 'postgresql://me:hunter2@127.0.0.1:1/x'\n")
    assert console.good("config", "show").startswith("# database postgresql://me:***@127.0.0.1:1/x; configuration")


@pytest.mark.parametrize("command", [("db", each) for each in ("upgrade", "status", "verify", "doctor")], ids=" ".join)
def test_no_private_server_starts_for_a_command_told_of_none(tmp_path: Path, command: tuple[str, str]) -> None:
    home, file = tmp_path / "home", tmp_path / "leasehold.toml"
    nowhere = Installation(home, None, PoolSettings, {}, at_home=True)
    with pytest.raises(BadInput, match=r"is not set, and no private server is in .*; name the configuration with --c"):
        operator.db_group.main([command[1]], obj=nowhere, standalone_mode=False)
    assert not home.exists()
    file.write_text("[database]\nurl = 'embedded'\n")
    for asked in (
        Installation(home, file, PoolSettings, {}, at_home=True),
        Installation(home, None, PoolSettings, {"LEASEHOLD_DATABASE_URL": "embedded"}, at_home=True),
        Installation(home, None, PoolSettings, {}, at_home=False),
    ):
        asked.require_cluster()
    embedded.directory_of(home).mkdir(parents=True)
    nowhere.require_cluster()


def test_verify_counts_every_invariant(connected: Console) -> None:
    found = json.loads(connected.good("db", "verify", "--json"))
    assert found.keys() == {invariant.id for invariant in invariants.INVARIANTS}
    assert all(each["rows"] == 0 for each in found.values())


@pytest.mark.breaks_invariants
def test_verify_exits_1_when_an_invariant_does_not_hold(connected: Console, database: Database) -> None:
    broken = "INSERT INTO jobs (queue, instance, platform, state) VALUES (1, 1, 1, 'leased')"
    database.run(lambda connection: connection.execute_sql(broken))
    done = connected.run("db", "verify", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["S2"]["rows"] == 1
    assert re.fullmatch(r"error: \d of \d+ invariants do not hold: S2.*\n", done.stderr)


def test_a_token_is_shown_once_listed_without_its_secret_and_revoked(connected: Console, database: Database) -> None:
    create = ("token", "create", "submitter", "--instance")
    made = json.loads(connected.good(*create, "team", "--create", "--expires-in", "1h", "--json"))
    refused = connected.refused(*create, "taem")
    assert refused.startswith("instance: there is no instance 'taem'; did you mean 'team'?")
    holder = database.run(lambda connection: tokens.verify(connection, made["token"]))
    assert (holder.kind, holder.instance) == ("submitter", "team")
    listed = connected.good("token", "list", "--json")
    assert made["token"] not in listed
    assert [(each["id"], each["instance"]) for each in json.loads(listed)] == [(made["id"], "team")]
    assert made["id"] in connected.good("token", "list")

    assert connected.good("token", "revoke", made["id"]) == f"{made['id']} is revoked\n"
    assert json.loads(connected.good("token", "list", "--json"))[0]["revoked_at"] is not None


def test_a_bot_token_may_be_limited_to_labels_and_a_pool(connected: Console) -> None:
    connected.good("token", "create", "bot", "--bot", "b1", "--label", "gpu", "--label", "a", "--pool", "blue")
    (listed,) = json.loads(connected.good("token", "list", "--json"))
    assert (listed["labels"], listed["pool"]) == (["a", "gpu"], "blue")
    assert connected.refused("token", "create", "submitter", "--pool", "blue").startswith("pool: means nothing")
    assert connected.refused("token", "create", "operator", "--bot", "x").startswith("bot: means nothing for a token")
    assert connected.refused("token", "create", "bot").startswith("bot: a bot token needs a bot name")
    assert connected.refused("token", "revoke", "nobody") == f"there is no token '{escaped('nobody')}'"


def test_a_reader_that_goes_away_is_not_an_error_to_talk_about(console: Console) -> None:
    command = f"{LEASEHOLD} help; echo $? >&2"
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], cwd=console.directory, env=console.environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "1\n"
    process.stderr.close()
    process.wait(MINUTE)


#: Commands that start fast, and the exit code of each.
ON_STREAMS = [
    ("help >&-", 0),
    ("help >&- 2>&- <&-", 0),
    ("help 2>&-", 0),
    ("nothing 2>&-", 2),
    ("nothing 2>/dev/full", 2),
    ("help", 0),
    ("submit --help", 0),
]


@pytest.mark.parametrize(
    ("encoding", "command", "code"),
    [
        *((encoding, *each) for encoding in ("utf-8", "latin-1", "ascii") for each in ON_STREAMS),
        ("ascii", "config show >&- 2>&- <&-", 0),
        ("ascii", "config show --json 2>&-", 0),
    ],
)
def test_streams_are_closed_or_full_or_of_another_encoding(
    console: Console, encoding: str, command: str, code: int
) -> None:
    environ = {**console.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": encoding}
    environ["LC_ALL"] = "C"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{LEASEHOLD} {command}"], cwd=console.directory, env=environ,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=MINUTE, check=False,
    )  # fmt: skip
    assert (done.returncode, b"Traceback" in done.stderr) == (code, False), done


def test_a_stream_that_is_closed_is_so_for_no_program_that_is_started(tmp_path: Path) -> None:
    program = (
        "import subprocess; from assigner.cli import errors; errors.open_streams(); "
        "subprocess.run(['readlink', *(f'/dev/fd/{n}' for n in range(3))], stdout=open('said', 'w'))"
    )
    python = LEASEHOLD.with_name("python")
    subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", python, "-c", program], cwd=tmp_path, check=True)
    assert (tmp_path / "said").read_text().split() == ["/dev/null", str(tmp_path / "said"), "/dev/null"]


def test_json_is_utf_8_or_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"label": "größe ✓ 😀"}
    for encoding in ("utf-8", "UTF8", "latin-1", "ascii"):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr("sys.stdout", out)
        readable.print_json(said)
        out.flush()
        written = cast(io.BytesIO, out.buffer).getvalue().decode()
        assert (json.loads(written), "😀" in written) == (said, encoding in ("utf-8", "UTF8"))
        monkeypatch.undo()


def test_a_log_that_cannot_be_written_stops_nothing_and_tells_what_is_missing() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writer, bytes(4096))
    log = io.TextIOWrapper(io.BufferedWriter(errors.StandardError(writer, "w")), line_buffering=True)
    for number in range(3):
        log.write(f"{number} is lost\n")
    os.set_blocking(writer, True)
    assert len(os.read(reader, filled)) == filled
    log.write("this is there\n")
    log.write("this too\n")
    assert os.read(reader, filled) == b"\nlines that could not be written here: 3\nthis is there\nthis too\n"
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), writer)
    log.write("this is lost too\n")
    log.close()
    os.close(reader)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("--data", "is not there"), 2),
        (NotFound("id: there is no job 'x'"), 2),
        (Conflict("key_reused", "jobs[0].key: 'k' was used before for a different request"), 2),
        (NotReady("the database cannot be reached"), 3),
        (QueueFull("label 'nightly' may have 3 queued jobs"), 1),
        (Forbidden("operators only"), 1),
        (Unauthorised("no token"), 2),
        (LeaseholdError("it failed"), 1),
        (click.exceptions.Abort(), 130),
    ],
)
def test_every_error_has_its_exit_code(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def failing() -> NoReturn:
        raise error

    assert errors.run(failing, []) == code
    assert capsys.readouterr().err == ("" if code == 130 else f"error: {error}\n")
    # What was done before it stands in the same line.
    error.add_note("2 jobs were changed before")
    assert errors.run(failing, []) == code
    assert capsys.readouterr().err == ("" if code == 130 else f"error: {error}; 2 jobs were changed before\n")


def test_cancelling_what_is_over_is_one_line_and_exit_2(stands: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    detail = f"job '{JOB}' is succeeded already; results are kept"
    stands.script = in_turn(problem(409, detail, code="already_final"))
    for options in ([], ["--json"]):
        assert errors.run(cli, ["cancel", *options, JOB]) == 2
        told = capsys.readouterr()
        assert (told.out, told.err) == ("", f"error: {detail}\n")
    assert stands.asked[0].body == {"ids": [JOB]}


@pytest.mark.parametrize(("arguments", "code"), [(["config", "show"], 0), (["db", "status"], 3)], ids=str)
def test_the_fork_server_of_the_tests_does_as_the_console_script(
    console: Console, tmp_path: Path, arguments: list[str], code: int
) -> None:
    away = {"LEASEHOLD_DATABASE_URL": "postgresql://127.0.0.1:1/x", "LEASEHOLD_DATABASE_OUTAGE_SECONDS": "0"}
    forked, real = (each.run(*arguments, environ=away) for each in (console, Console(tmp_path, LEASEHOLD)))
    assert real.returncode == code
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


def test_ctrl_c_while_modules_are_imported_ends_the_program_without_a_word() -> None:
    stopped = """
import sys
from assigner.cli import start

class Stopped:
    def find_spec(self, name, *_):
        if name == "click":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Stopped())
start()
"""
    done = subprocess.run([sys.executable, "-c", stopped], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
