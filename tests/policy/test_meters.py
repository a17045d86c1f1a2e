"""Usage meters: written by operators, by programs and by commands; what they tell of the hours of the day."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from leasehold.errors import BadInput

from assigner.maintenance import meters
from assigner.maintenance.meters import MeterPoller, MeterSettings, read_meter
from schema.policy import meters as usage_meters
from schema.policy import time_windows
from schema.policy.meters import Level, Meter
from schema.policy.time_windows import Window, WindowSchedule, WindowSettings
from schema.validation import load_zone
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool
from tests.support.servers import assigner_process

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MIDNIGHT = NOON.replace(hour=0)


def days(percents: dict[int, float], count: int = 3) -> list[Level]:
    """A history of whole days, with these percents at hours of UTC."""
    return [
        Level(MIDNIGHT - timedelta(days=day) + timedelta(hours=hour), percent)
        for day in range(count)
        for hour, percent in percents.items()
    ]


def window(name: str, start: int, end: int, *, percent: float = 50.0, **fields: Any) -> Window:
    settings = {"name": name, "start": start, "end": end, "meter": "plan", "usage_threshold": 80.0, **fields}
    meter = Meter("plan", percent * 2, 200.0, None, NOON)
    return Window(WindowSettings.model_validate(settings), meter)


def test_the_pattern_tells_peaks_and_idle_times_of_the_day() -> None:
    levels = days(dict.fromkeys(range(24), 5.0) | {9: 60.0, 10: 80.0, 11: 64.0, 15: 40.0})
    found = meters.usage_pattern(levels, load_zone("UTC"))
    assert found.avg_usage_by_hour[10] == 80
    assert found.avg_usage_by_hour[3] == 5
    assert found.peak_hours == [10, 11]
    assert found.idle_periods == [(12, 15), (16, 9)]
    berlin = meters.usage_pattern(levels, load_zone("Europe/Berlin"))
    assert berlin.peak_hours == [11, 12]
    found = meters.usage_pattern([Level(NOON, 10.0), Level(NOON - timedelta(days=1), 30.0)], load_zone("UTC"))
    assert found.avg_usage_by_hour == [None] * 12 + [20.0] + [None] * 11, "nothing is made up"
    assert (found.peak_hours, found.idle_periods) == ([12], [])


def test_the_best_start_is_the_next_window_where_usage_and_estimate_stay_below_the_threshold() -> None:
    windows = WindowSchedule([window("day", 8, 20, usage_threshold=20.0), window("night", 20, 8)])
    histories = {"plan": days({8: 5.0, 20: 70.0})}
    night = meters.best_start(windows, "random", estimate=18, histories=histories, now=NOON)
    assert night == meters.StartForecast("night", NOON.replace(hour=20), 70.0)
    # 70 % and 20 of 200 more would reach the threshold, so it is the morning of the next day.
    day = meters.best_start(windows, "random", estimate=20, histories=histories, now=NOON)
    assert day == meters.StartForecast("day", NOON.replace(hour=8) + timedelta(days=1), 5.0)
    assert meters.best_start(windows, "random", estimate=160, histories=histories, now=NOON) is None


def test_a_window_of_other_classes_or_with_an_unread_meter_is_no_suitable_window() -> None:
    unread = Window(window("night", 20, 8).settings)
    windows = WindowSchedule([window("day", 8, 20, types=["critical"]), unread])
    assert meters.best_start(windows, "random", estimate=0, histories={}, now=NOON) is None
    found = meters.best_start(windows, "critical", estimate=0, histories={}, now=NOON)
    assert found == meters.StartForecast("day", NOON, 50.0)


def test_the_best_start_is_now_where_an_open_window_lets_the_job_start() -> None:
    assert meters.best_start(WindowSchedule(), "random", estimate=9, histories={}, now=NOON) == meters.StartForecast(
        None, NOON, None
    )
    day = window("day", 8, 20, exempt_types=["critical"])
    windows = WindowSchedule([day, Window(window("night", 20, 8).settings)])

    def start(job_class: str, estimate: float, *, now: datetime = NOON) -> meters.StartForecast | None:
        return meters.best_start(windows, job_class, estimate=estimate, histories={"plan": days({8: 75.0})}, now=now)

    # The meter reads 50 %: 59 of 200 more leave it below 80 %, and 60 do not, now or at the expected 75 % of tomorrow.
    assert start("random", 59) == meters.StartForecast("day", NOON, 50.0)
    assert start("random", 60) is None
    assert start("critical", 60) == meters.StartForecast("day", NOON, 50.0)
    # Old readings close the window to all but exempt classes.
    late = NOON + timedelta(hours=2)
    assert start("random", 0, now=late) == meters.StartForecast("day", NOON.replace(hour=8) + timedelta(days=1), 75.0)
    assert start("critical", 0, now=late) == meters.StartForecast("day", late, 50.0)
    # At night a window that exempts the class is expected to open whatever its meter will read.
    night = NOON.replace(hour=22)
    assert start("critical", 900, now=night) == meters.StartForecast(
        "day", NOON.replace(hour=8) + timedelta(days=1), 75.0
    )


def telling(reading: str) -> MeterSettings:
    """A meter whose command prints this."""
    return MeterSettings(name="plan", command=("echo", reading))


def tomorrow(pool: Pool) -> datetime:
    found: datetime = pool.row("SELECT date_trunc('hour', now()) + interval '1 day' AS at").at
    return found


#: Times at which no meter is reset, and of which the last is in the year 10000 at UTC.
UNLIKELY_RESETS = ("0001-01-01T00:00:00Z", "2020-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00", 5)


def test_a_command_reads_a_meter_in_its_time_and_only_once(pool: Pool) -> None:
    resets_at = tomorrow(pool)
    told = json.dumps({"used": 12.5, "limit": 50, "resets_at": resets_at.isoformat(), "more": 1})
    one, other = (MeterPoller(pool.database, [telling(told)]) for _ in range(2))
    one.run_once()
    (first,) = pool.database.run(usage_meters.meters)
    assert (first.used, first.most, first.resets_at) == (12.5, 50, resets_at)
    other.run_once()
    assert pool.database.run(usage_meters.meters) == [first]
    pool.change("UPDATE usage_meters SET polled_at = now() - interval '300 s'")
    other.run_once()
    (second,) = pool.database.run(usage_meters.meters)
    assert second.updated_at > first.updated_at


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("echo", "{}"), "prints no reading: used: field required"),
        (("echo", "12 of 50"), "prints no reading: its output: invalid JSON"),
        (("echo", '{"used": NaN, "limit": 5}'), "prints no reading"),
        (("sh", "-c", "exit 3"), "ends with exit 3"),
        (("sh", "-c", "yes | head -c 70000"), "prints more than 65536 bytes"),
        (("sleep", "60"), "takes longer than 0.5 s"),
        (("/does/not/exist",), "cannot be run: No such file"),
    ],
)
def test_a_command_that_gives_no_reading_says_why(command: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        read_meter(MeterSettings(name="plan", command=command, timeout=0.5 if "sleep" in command else MINUTE))


def test_a_reading_that_cannot_be_leaves_the_one_before_it(pool: Pool) -> None:
    pool.database.run(lambda c: usage_meters.put(c, "plan", used=1, most=2))
    MeterPoller(pool.database, [telling('{"used": -1, "limit": 5}')]).run_once()
    (kept,) = pool.database.run(usage_meters.meters)
    assert (kept.used, kept.most) == (1, 2)


def test_an_assigner_process_keeps_windows_and_meters_as_its_configuration_says(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "leasehold.toml"
    printing = json.dumps(["echo", '{"used": 1, "limit": 4}'])
    file.write_text(
        f'[[meters]]\nname = "plan"\ncommand = {printing}\n'
        '[[windows]]\nname = "all-day"\nstart = 0\nend = 24\nmeter = "plan"\nusage_threshold = 25.0\n'
    )
    pool.submit(terms={"job_class": "random"})
    bot = pool.bot()
    with assigner_process(pool, file) as (running_process, _):
        (meter,) = eventually(lambda: pool.database.run(usage_meters.meters))
        assert meter.percent(NOON) == 25
        assert not bot.take()
        pool.database.run(lambda c: usage_meters.put(c, "plan", used=0, most=4))
        assert eventually(bot.take)
        file.write_text("")
        running_process.reload()
        eventually(lambda: not pool.database.run(time_windows.read).windows)


Answer = Callable[..., tuple[int, str]]


def test_an_operator_writes_and_reads_meters(operate: Answer) -> None:
    assert operate("rule", "meter", "set", "plan", "--used", "30", "--limit", "40") == (
        0,
        "plan stands at 75 % of its limit\n",
    )
    code, told = operate("rule", "meter", "list", "--json")
    (meter,) = json.loads(told)
    assert (code, meter["name"], meter["used"], meter["limit"], meter["resets_at"]) == (0, "plan", 30, 40, None)
    assert "plan" in operate("rule", "meter", "list")[1]
    assert operate("rule", "meter", "rm", "plan")[0] == 0
    assert json.loads(operate("rule", "meter", "list", "--json")[1]) == []


def test_what_cannot_be_meant_of_a_meter_is_refused(operate: Answer) -> None:
    for line, said in (
        ("set Plan --used 1 --limit 2", "name: 'Plan' is not a name"),
        ("set plan --used 1 --limit 0", "--limit: must be greater than or equal to 0.000001"),
        ("set plan --used -1 --limit 2", "--used: must be greater than or equal to 0"),
        ("set plan --used nan --limit 2", "--used: must be a finite number"),
        ("set plan --used 1 --limit 2 --resets-at tomorrow", "--resets-at: must be a valid datetime"),
        ("rm plan", "meter: no meter 'plan'"),
        ("pattern plan", "meter: nothing is known of 'plan'"),
        ("pattern plan --zone Mars/Olympus", "--zone: 'Mars/Olympus' is not a time zone"),
        ("forecast --class nosuch", "class: there is no job class 'nosuch'"),
    ):
        code, told = operate("rule", "meter", *line.split())
        assert (code, told.startswith(f"error: {said}")) == (2, True), told


def test_an_operator_asks_for_the_best_start_and_the_pattern(operate: Answer, pool: Pool) -> None:
    assert operate("rule", "meter", "forecast", "--class", "random") == (0, "now: there are no windows\n")
    # A window that opens two hours from now, so that it is closed whatever the time of the day.
    hour = (pool.row("SELECT extract(hour FROM now() AT TIME ZONE 'UTC')::integer AS hour").hour + 2) % 24
    settings = WindowSettings(name="later", start=hour, end=hour + 1, meter="plan", usage_threshold=80)
    pool.database.run(lambda c: time_windows.declare(c, [settings], actor="test"))
    operate("rule", "meter", "set", "plan", "--used", "10", "--limit", "40")
    assert operate("rule", "meter", "forecast", "--class", "random", "--estimate", "22") == (0, "no suitable window\n")
    code, told = operate("rule", "meter", "forecast", "--class", "random", "--estimate", "21")
    assert code == 0
    assert told.startswith("window 'later' opens at ")
    assert told.endswith(f" {hour:02}:00 UTC, its meter expected at 25 %\n")
    pattern = json.loads(operate("rule", "meter", "pattern", "plan", "--json")[1])
    assert [each for each in pattern["avg_usage_by_hour"] if each is not None] == [25]
    settings = WindowSettings(name="always", start=0, end=24, meter="plan", usage_threshold=80)
    pool.database.run(lambda c: time_windows.declare(c, [settings], actor="test"))
    asked = ("rule", "meter", "forecast", "--class", "random", "--estimate", "21")
    assert operate(*asked) == (0, "now: window 'always' is open, its meter at 25 %\n")
    found = json.loads(operate(*asked, "--json")[1])
    assert (found["now"], found["window"], found["percent"]) == (True, "always", 25)


def test_a_program_writes_a_meter_through_the_gateway(operator: httpx.Client, pool: Pool) -> None:
    body = {"used": 3, "limit": 4.5, "resets_at": tomorrow(pool).isoformat()}
    assert operator.put("/v1/meters/plan", json=body).json() == {"name": "plan"}
    (meter,) = operator.get("/v1/meters").json()["meters"]
    assert {key: meter[key] for key in ("name", "used", "limit")} == {"name": "plan", "used": 3, "limit": 4.5}
    for wrong in ({"used": 1}, {"used": 1, "limit": 0}, {"used": "1", "limit": 2}, {**body, "resets_at": "2030-01-01"}):
        assert operator.put("/v1/meters/plan", json=wrong).status_code == 422
    assert operator.put("/v1/meters/Plan", json=body).status_code == 400
    for given in UNLIKELY_RESETS:
        answer = operator.put("/v1/meters/plan", json={**body, "resets_at": given})
        assert (answer.status_code, answer.json()["field"]) == (400, "resets_at")
    for at in pool.row("SELECT now() - interval '1 hour' AS passed, now() + interval '365 days' AS ahead"):
        assert operator.put("/v1/meters/plan", json={**body, "resets_at": at.isoformat()}).status_code == 200
    assert operator.delete("/v1/meters/plan").status_code == 200
    assert operator.delete("/v1/meters/plan").status_code == 404
