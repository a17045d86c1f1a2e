"""Schedules that an app or the configuration declares: who owns them, and what two appliers at once do."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from leasehold.errors import BadInput, Conflict

from assigner.config.loading import load
from assigner.maintenance.schedules import Schedules
from assigner.process import assign
from assigner.settings import PoolSettings
from schema.policy import schedule_changes
from schema.policy.schedule_changes import AppliedSchedule, Author, DeclaredSchedule
from schema.policy.schedules import ScheduleTerms
from schema.postgres.connection import Connection
from tests.support.http import audited
from tests.support.patience import eventually
from tests.support.pool import Pool

TICK = "date_trunc('month', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'"
WAITING = """
SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = 'advisory'
"""


def terms(**fields: Any) -> ScheduleTerms:
    return ScheduleTerms(**{
        "cron": "0 0 1 * *", "zone": "UTC", "catch_up": "skip", "catch_up_most": 10, "catch_up_seconds": 4e6,
        "overlap": "allow", "enabled": True, "request": {"command": ["true"]}, **fields,
    })  # fmt: skip


def declared(name: str, *, instance: str = "default", keeps_enabled: bool = True, **fields: Any) -> DeclaredSchedule:
    return DeclaredSchedule(instance, name, terms(**fields), keeps_enabled)


def applied(
    connection: Connection, *wanted: DeclaredSchedule, app: str = "shop", prune: bool = False, take_over: bool = False
) -> list[AppliedSchedule]:
    author = Author("operator:t", None, f"app:{app}", take_over)
    return schedule_changes.apply_schedules(connection, wanted, instances=None, prune=prune, author=author)


def outcomes(pool: Pool, *wanted: DeclaredSchedule, **how: Any) -> dict[str, str]:
    return {each.name: each.outcome for each in pool.database.run(lambda c: applied(c, *wanted, **how))}


def put(pool: Pool, name: str, **fields: Any) -> None:
    by_hand = Author("operator:t")
    pool.database.run(lambda c: schedule_changes.put_schedule(c, "default", name, terms(**fields), author=by_hand))


def owners(pool: Pool) -> dict[str, str | None]:
    return {row.name: row.declared_by for row in pool.rows("SELECT name, declared_by FROM schedules")}


def test_an_app_makes_changes_keeps_and_removes_its_own(pool: Pool) -> None:
    put(pool, "by-hand")
    assert outcomes(pool, declared("a"), declared("b")) == {"a": "created", "b": "created"}
    written = audited(pool.database)
    tick = pool.row("SELECT next_tick FROM schedules WHERE name = 'a'").next_tick
    assert outcomes(pool, declared("a"), declared("b")) == {"a": "unchanged", "b": "unchanged"}
    assert audited(pool.database) == written, "the second time writes nothing"

    later = {"a": declared("a", overlap="skip"), "c": declared("c", instance="other")}
    assert outcomes(pool, *later.values()) == {"a": "changed", "b": "left", "c": "created"}
    assert tuple(pool.row("SELECT next_tick, overlap FROM schedules WHERE name = 'a'")) == (tick, "skip")
    assert outcomes(pool, *later.values(), prune=True) == {"a": "unchanged", "b": "removed", "c": "unchanged"}
    assert outcomes(pool, prune=True, app="another") == {}
    assert owners(pool) == {"by-hand": None, "a": "app:shop", "c": "app:shop"}
    assert outcomes(pool, prune=True) == {"a": "removed", "c": "removed"}
    assert owners(pool) == {"by-hand": None}


def test_what_somebody_else_has_set_is_refused_unless_it_is_taken_over(pool: Pool) -> None:
    put(pool, "by-hand")
    outcomes(pool, declared("theirs"), app="other")
    assert outcomes(pool, declared("by-hand"), declared("theirs")) == {"by-hand": "refused", "theirs": "refused"}
    done = pool.database.run(lambda c: applied(c, declared("by-hand"), declared("theirs")))
    with pytest.raises(Conflict) as caught:
        schedule_changes.refuse_owned(done, source="app:shop")
    assert caught.value.code == "schedule_owned"
    assert str(caught.value) == (
        "the app 'shop' declares schedules of other owners: default/by-hand (a command), default/theirs (the app "
        "'other'); take them over (--take-over, take_over), or give yours other names"
    )
    assert owners(pool) == {"by-hand": None, "theirs": "app:other"}
    taken = outcomes(pool, declared("by-hand"), declared("theirs"), take_over=True)
    assert taken == {"by-hand": "changed", "theirs": "changed"}, (
        "the owner is part of a schedule, even if its terms stay"
    )
    assert owners(pool) == {"by-hand": "app:shop", "theirs": "app:shop"}
    assert outcomes(pool, declared("theirs"), app="other", prune=True) == {"theirs": "refused"}


def test_a_command_changes_and_removes_a_declared_one_only_if_it_takes_it_over(pool: Pool) -> None:
    outcomes(pool, declared("a"), declared("b"))
    with pytest.raises(Conflict, match=r"^schedule 'a' is declared by the app 'shop': change it there and apply it ag"):
        put(pool, "a", cron="1 0 1 * *")
    taking = Author("operator:t", take_over=True)
    with pytest.raises(Conflict, match="'b' is declared by the app 'shop'"):
        pool.database.run(lambda c: schedule_changes.remove_schedule(c, "default", "b", author=Author("operator:t")))
    pool.database.run(lambda c: schedule_changes.put_schedule(c, "default", "a", terms(), author=taking))
    pool.database.run(lambda c: schedule_changes.remove_schedule(c, "default", "b", author=taking))
    assert owners(pool) == {"a": None}
    assert outcomes(pool, declared("a"), declared("b")) == {"a": "refused", "b": "created"}


def test_one_that_an_operator_disabled_stays_disabled_unless_the_declaration_says_otherwise(pool: Pool) -> None:
    outcomes(pool, declared("a"))
    disable = lambda c: schedule_changes.enable_schedule(c, "default", "a", enabled=False, actor="operator:t")  # noqa: E731
    pool.database.run(disable)
    assert outcomes(pool, declared("a")) == {"a": "unchanged"}
    assert outcomes(pool, declared("a", overlap="skip")) == {"a": "changed"}
    row = pool.row("SELECT enabled, next_tick, overlap, declared_by FROM schedules")
    assert tuple(row) == (False, None, "skip", "app:shop")
    assert outcomes(pool, declared("a", keeps_enabled=False, overlap="skip")) == {"a": "changed"}
    assert pool.row("SELECT enabled FROM schedules").enabled is True


def test_two_appliers_at_once_take_turns_and_the_second_finds_everything_done(pool: Pool) -> None:
    """The first one is in the middle of its transaction; the second one must neither fail nor make anything twice."""
    wanted = [declared("a"), declared("b", overlap="skip")]
    with ThreadPoolExecutor(1) as threads, pool.database.connect() as first:
        assert [each.outcome for each in applied(first, *wanted)] == ["created", "created"]
        second = threads.submit(outcomes, pool, *reversed(wanted), prune=True)
        eventually(lambda: bool(pool.rows(WAITING)))
        first.commit()
        assert second.result(60) == {"a": "unchanged", "b": "unchanged"}
    assert owners(pool) == {"a": "app:shop", "b": "app:shop"}


def test_a_command_that_makes_the_same_schedule_at_the_same_time_owns_it(pool: Pool) -> None:
    with ThreadPoolExecutor(1) as threads, pool.database.connect() as first:
        schedule_changes.put_schedule(first, "default", "a", terms(), author=Author("operator:t"))
        second = threads.submit(outcomes, pool, declared("a"))
        eventually(lambda: bool(pool.rows(WAITING.replace("'advisory'", "'transactionid'"))))
        first.commit()
        assert second.result(60) == {"a": "refused"}
    assert owners(pool) == {"a": None}


def test_two_assigners_make_one_job_of_a_tick_of_a_declared_schedule_that_is_applied_meanwhile(pool: Pool) -> None:
    outcomes(pool, declared("a"))
    pool.change(f"UPDATE schedules SET next_tick = {TICK}, due_at = {TICK}")
    with pool.database.connect() as held:
        applied(held, declared("a", overlap="skip"))
        assert Schedules(pool.database).run_once() == 0.5, "the row is being changed: it looks again soon"
        assert pool.rows("SELECT FROM jobs") == []
        held.commit()
    for _ in range(2):
        Schedules(pool.database).run_once()
    assert outcomes(pool, declared("a", overlap="skip")) == {"a": "unchanged"}
    Schedules(pool.database).run_once()
    assert len(pool.rows("SELECT FROM jobs")) == 1


CONFIG = """
[[schedules]]
name = "nightly"
cron = "0 3 * * *"
zone = "Europe/Berlin"
job = { command = ["make", "nightly"], label = "night" }

[[schedules]]
name = "weekly"
instance = "ci"
cron = "0 3 * * SUN"
enabled = false
[schedules.job]
command = ["make", "weekly"]
"""


def configured(pool: Pool, tmp_path: Path, text: str) -> None:
    file = tmp_path / "leasehold.toml"
    file.write_text(text)
    assign.declare(pool.database, load(file, PoolSettings, {}))


def test_the_configuration_declares_schedules_and_takes_back_what_it_declares_no_longer(
    pool: Pool, tmp_path: Path
) -> None:
    put(pool, "by-hand")
    outcomes(pool, declared("of-shop"))
    configured(pool, tmp_path, CONFIG)
    assert owners(pool) == {"by-hand": None, "of-shop": "app:shop", "nightly": "config", "weekly": "config"}
    row = pool.row("SELECT zone, set_by, request, enabled FROM schedules WHERE name = 'nightly'")
    assert tuple(row) == ("Europe/Berlin", "config", {"command": ["make", "nightly"], "label": "night"}, True)
    assert pool.row("SELECT enabled FROM schedules WHERE name = 'weekly'").enabled is False
    written = audited(pool.database)
    configured(pool, tmp_path, CONFIG)
    assert audited(pool.database) == written
    configured(pool, tmp_path, "")
    assert owners(pool) == {"by-hand": None, "of-shop": "app:shop"}


def test_nobody_takes_over_what_the_configuration_declares_and_it_takes_over_nothing(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(pool, tmp_path, CONFIG)
    for change in (
        lambda c: schedule_changes.put_schedule(c, "default", "nightly", terms(), author=Author("o", take_over=True)),
        lambda c: schedule_changes.remove_schedule(c, "default", "nightly", author=Author("o", take_over=True)),
    ):
        with pytest.raises(Conflict, match=r"declared by the configuration: change \[\[schedules\]\] there$"):
            pool.database.run(change)
    assert outcomes(pool, declared("nightly"), take_over=True) == {"nightly": "refused"}
    done = pool.database.run(lambda c: applied(c, declared("nightly"), take_over=True))
    with pytest.raises(Conflict, match=r"remove those of the configuration from \[\[schedules\]\] there$"):
        schedule_changes.refuse_owned(done, source="app:shop")

    put(pool, "mine")
    configured(pool, tmp_path, CONFIG.replace("nightly", "mine"))
    assert owners(pool) == {"mine": None, "weekly": "config"}
    assert "because it has another owner" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('cron = "0 3 * * *"', 'cron = "0 3 * *"', ":4: schedules[0].cron: '0 3 * *' has 4 fields, not the five"),
        ("Europe/Berlin", "Mars", ":5: schedules[0].zone: 'Mars' is not a time zone"),
        ("label =", "lable =", ":6: schedules[0].job.lable: is not a setting; did you mean 'label'?"),
        ("zone =", "zoen =", ":5: schedules[0].zoen: is not a setting; did you mean 'zone'?"),
        ('"make", "nightly"', "", ":6: schedules[0].job.command: "),
        ('label = "night"', 'key = "k"', "job.key: belongs to the schedule and not to its job"),
        ('label = "night"', 'model = "m"', "model: needs a resource_class"),
        ("0 3 * * *", "0 0 */31 2 MON#5", "has no tick within 50 years"),
        ('name = "weekly"\ninstance = "ci"', 'name = "nightly"', "schedules: 'nightly' is declared twice in one insta"),
    ],
)
def test_a_wrong_schedule_of_the_configuration_is_refused_when_it_is_read(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    file = tmp_path / "leasehold.toml"
    file.write_text(CONFIG.replace(before, after))
    with pytest.raises(BadInput) as caught:
        load(file, PoolSettings, {})
    assert said in str(caught.value)
