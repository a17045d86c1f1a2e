"""Schedules that a program declares: what is sent for them, what is refused when it is written, and a whole life."""

import json
import random
from collections.abc import Callable
from typing import Any

import leasehold
import pytest
from leasehold import wire
from leasehold.client import Client
from leasehold.errors import BadInput, Conflict
from leasehold.pool import Pool
from leasehold.tasks import periodic

from assigner.maintenance.schedules import Schedules
from tests.support.apps import schedule_app
from tests.support.pool import Pool as Database
from tests.support.servers import Served

#: The tick of the month that has begun. No test lasts until the next.
TICK = "date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'"
shop = Pool.from_env()


@shop.task(unique=True)
def once(word: str = "") -> str:
    return word


@shop.task
def work(word: str = "", *more: int, loud: bool = False) -> str:
    return word


@pytest.fixture(autouse=True)
def _declares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shop, "schedules", {})


@pytest.fixture
def client(served: Served) -> Client:
    return Client(served.url, served.token("operator"), chance=random.Random(1), patience=0.0)


def test_a_schedule_is_a_call_of_its_task_with_the_options_of_the_task() -> None:
    mail, monthly = schedule_app.pool.schedules["mail"], schedule_app.pool.schedules["reports.send"]
    job = mail.record["job"]
    assert mail.record == {
        "name": "mail",
        "cron": "*/5 * * * *",
        "zone": "Europe/Berlin",
        "overlap": "skip",
        "instance": "office",
        "job": {
            "command": ["leasehold-task", "tests.support.apps.schedule_app:pool", "reports.send"],
            "stdin": job["stdin"],
            "properties": {"app": "reports"},
            "label": "mail",
            "max_attempts": 3,
            "retry_failed": True,
        },
    }
    assert json.loads(job["stdin"]) == {"args": ["all"], "kwargs": {"loud": True}}
    assert {key: monthly.record[key] for key in ("zone", "catch_up", "catch_up_most")} == {
        "zone": "UTC", "catch_up": "all", "catch_up_most": 3
    }  # fmt: skip
    assert schedule_app.send("all", loud=True) == "all!", "a decorated task is the task"
    shop.periodic("0 * * * *", kwargs={"word": "ä"})(work)
    (umlaut,) = shop.schedules.values()
    written = '{"args": [], "kwargs": {"word": "\\u00e4"}}'
    assert umlaut.record["job"]["stdin"] == written, "no version changes a schedule of another that escaped letters"


MISSPELT: list[tuple[Any, dict[str, Any], str]] = [
    ("*/5 * * *", {}, "cron: '*/5 * * *' has 4 fields, not the five fields minute, hour,"),
    ("61 * * * *", {}, "cron: '61 * * * *' is not a cron expression: bad minute"),
    ("0 0 */31 2 MON#5", {}, "cron: '0 0 */31 2 MON#5' has no tick within 50 years"),
    (5, {}, "cron: is a text such as '*/5 * * * *', not a 'int'"),
    ("* * * * *", {"timezone": "Europe/Berlni"}, "timezone: 'Europe/Berlni' is not a time zone"),
    ("* * * * *", {"timezone": None}, "timezone: is a name such as 'Europe/Berlin', not a 'NoneType'"),
    ("* * * * *", {"timezon": "UTC"}, "timezon: is not an option of a schedule; did you mean 'timezone'?"),
    ("* * * * *", {"overlaps": "skip"}, "overlaps: is not an option of a schedule; did you mean 'overlap'?"),
    ("* * * * *", {"overlap": "wait"}, "overlap: is 'allow' or 'skip', not wait"),
    ("* * * * *", {"catch_up_most": 0}, "catch_up_most: is a number from 1 to 1000, not 0"),
    ("* * * * *", {"catch_up_seconds": True}, "catch_up_seconds: is a number of seconds, up to a year, not True"),
    ("* * * * *", {"enabled": 1}, "enabled: is true or false, not 1"),
    ("* * * * *", {"name": "Nightly"}, "name: 'Nightly' is not a name"),
    ("* * * * *", {"args": "seven"}, "args: is a list or a tuple of arguments, such as (7,), not a 'str'"),
    ("* * * * *", {"kwargs": [1]}, "kwargs: is a mapping of named arguments, not a 'list'"),
    ("* * * * *", {"args": (object(),)}, "word: a value of type 'object' is not JSON"),
]


def test_what_is_misspelt_is_refused_where_it_is_written() -> None:
    for cron, options, said in MISSPELT:
        with pytest.raises(BadInput) as caught:
            shop.periodic(cron, **options)(work)
        assert str(caught.value).startswith(said)
    assert shop.schedules == {}


def test_what_no_tick_can_call_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"quiet"):
        shop.periodic("* * * * *", kwargs={"quiet": True})(work)
    with pytest.raises(BadInput, match=r"^periodic: stands above @pool.task, and 'print' is no task$"):
        shop.periodic("* * * * *")(print)  # type: ignore[type-var]
    with pytest.raises(BadInput, match=r"'reports.send' is a task of another pool"):
        shop.periodic("* * * * *", args=("x",))(schedule_app.send)
    with pytest.raises(BadInput, match=r"^unique: .* overlap='skip', and `once.using\(unique=False\)`"):
        shop.periodic("* * * * *")(once)
    shop.periodic("* * * * *", name="once", overlap="skip")(once.using(unique=False))
    with pytest.raises(BadInput, match=r"^key: "):
        shop.periodic("* * * * *")(work.using(key="k"))
    assert list(shop.schedules) == ["once"]


def test_two_schedules_of_one_name_are_refused_and_a_module_may_be_imported_again() -> None:
    shop.periodic("* * * * *", name="a")(work)
    with pytest.raises(BadInput, match=r"^name: 'a' is the name of two schedules"):
        shop.periodic("0 * * * *", name="a")(work.using(priority=3))
    with pytest.raises(BadInput, match=r"^name: 'a' is the name of two schedules"):
        shop.periodic("0 * * * *", name="a")(once.using(unique=False))
    shouted = shop.task(name="Shout")(work.function)
    with pytest.raises(BadInput, match=r"^name: 'Shout' is no name of a schedule: give one, such as name='nightly'"):
        shop.periodic("* * * * *")(shouted)


def test_a_machine_without_time_zones_takes_utc_and_says_what_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "zone_names", frozenset)
    shop.periodic("* * * * *", name="a", timezone="UTC")(work)
    with pytest.raises(BadInput, match=r"^timezone: .* install the package tzdata$"):
        shop.periodic("* * * * *", name="b", timezone="Europe/Berlin")(work)


def test_a_pool_whose_app_is_not_known_says_how_to_name_it() -> None:
    with pytest.raises(BadInput, match=r"^app: the pool has no tasks: name the app, as in Pool.from_env\(app=…\)$"):
        periodic.app_of(Pool.from_env())
    assert periodic.app_of(shop) == work.registry.app_of(work.function.__module__)
    assert periodic.app_of(schedule_app.pool) == "reports"


def test_a_pool_applies_what_its_code_declares_and_a_tick_makes_the_call(
    client: Client, pool: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(schedule_app.pool), "_client", client)
    first = schedule_app.pool.apply_schedules()
    assert [(each.name, each.instance, each.outcome) for each in first] == [
        ("mail", "office", "created"), ("reports.send", "office", "created")
    ]  # fmt: skip
    assert isinstance(first[0], leasehold.AppliedSchedule)
    shown = client.schedules.show("mail", instance="office")
    assert first[0].next_tick is not None
    assert (shown["declared_by"], shown["zone"]) == ("app:reports", "Europe/Berlin")
    assert [each.outcome for each in schedule_app.pool.apply_schedules(prune=True)] == ["unchanged", "unchanged"]

    pool.change(f"UPDATE schedules SET next_tick = {TICK}, due_at = {TICK} WHERE name = 'reports.send'")
    for _ in range(2):
        Schedules(pool.database).run_once()
    (job,) = client.list(label="mail").jobs
    assert (job["metadata"]["schedule"], job["instance"]) == ("reports.send", "office")

    monkeypatch.setattr(schedule_app.pool, "schedules", {})
    assert [each.outcome for each in schedule_app.pool.apply_schedules()] == ["left", "left"]
    assert [each.outcome for each in schedule_app.pool.apply_schedules(prune=True)] == ["removed", "removed"]


def test_what_another_has_set_is_named_and_can_be_taken_over(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(schedule_app.pool), "_client", client)
    client.schedules.put("mail", "0 3 * * *", {"command": ["true"]}, instance="office")
    with pytest.raises(Conflict, match=r"office/mail \(a command\); take them over") as caught:
        schedule_app.pool.apply_schedules()
    assert caught.value.code == "schedule_owned"
    taken = schedule_app.pool.apply_schedules(take_over=True)
    assert [each.outcome for each in taken] == ["changed", "created"]
    with pytest.raises(Conflict, match=r"'mail' is declared by the app 'reports'"):
        client.schedules.remove("mail", instance="office")
    client.schedules.remove("mail", instance="office", take_over=True)


def test_the_command_tells_of_each_schedule(operate: Callable[..., tuple[int, str]]) -> None:
    app = "tests.support.apps.schedule_app:pool"
    code, said = operate("schedule", "apply", app)
    assert (code, [line.partition(";")[0] for line in said.splitlines()]) == (
        0, ["mail is created", "reports.send is created"]
    )  # fmt: skip
    assert [each["outcome"] for each in json.loads(operate("schedule", "apply", app, "--json")[1])] == ["unchanged"] * 2
    operate("schedule", "disable", "mail", "--instance", "office")
    assert "mail is unchanged, disabled\n" in operate("schedule", "apply", app)[1]
    for wrong, told in (
        ("shop", "shop"),
        (
            "tests.support.apps.none:pool",
            "there is no module 'tests.support.apps.none' in the directory where the command was started, ",
        ),
        ("tests.support.apps.schedule_app:pol", "has no 'pol'"),
        ("ops.grafana:pool", "'ops.grafana' is the directory "),
    ):
        code, said = operate("schedule", "apply", wrong)
        assert (code != 0, told in said, said.count("\n")) == (True, True, 1), said
