"""Pasts that are recorded elsewhere, drawn by chance or changed; and the figures of what a pool did."""

import gzip
import random
from dataclasses import replace
from pathlib import Path

import pytest
from leasehold.errors import BadInput

from assigner.simulation.generated import BEGIN, generate, read_bots
from assigner.simulation.past import Attempt, Past, PastBot, PastJob, onwards, shaken, with_more
from assigner.simulation.plot import units_in_use, waits
from assigner.simulation.records import JobRecord, LeaseRecord, Records
from assigner.simulation.replay import exact_step, step_of
from assigner.simulation.report import Waits, losers, measure
from assigner.simulation.traces import read_trace

SWF = """; MaxNodes: 2
; MaxProcs: 8
1 0 5 100 4 -1 -1 4 -1 -1 1 7 1 -1 0 -1 -1 -1
2 10 5 60 1 -1 -1 -1 -1 -1 0 8 1 -1 2 -1 -1 -1
3 20 5 60 8 -1 -1 8 -1 -1 1 8 1 -1 2 -1 -1 -1
1 5 5 40 4 -1 -1 4 -1 -1 2 7 1 -1 0 -1 -1 -1
4 30 5 -1 1 -1 -1 1 -1 -1 5 8 1 -1 2 -1 -1 -1
5 9000 5 60 1 -1 -1 1 -1 -1 1 8 1 -1 2 -1 -1 -1
"""
GOOGLE = """time,type,collection_id,priority,instance_index,resource_request.cpus
5000000,0,17,200,0,0.0015
6000000,0,18,25,1,0.5
7000000,3,17,200,0,0.0015
7500000,4,17,200,0,0.0015
7600000,0,17,200,0,0.0015
8000000,3,17,200,0,0.0015
68000000,6,17,200,0,0.0015
"""
ALIBABA = """M1,2,j_1,1,Terminated,100,160,150,0.5
R2_1,1,j_1,1,Waiting,0,0,100,0.5
"""
OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
pod-1,8000,1,1,460,,LS,Running,10,110,20
pod-2,8000,1,0,0,,BE,Running,10,110,20
"""
TRACES = {
    "swf": (SWF, None, [("1", 0.0, 100.0, 4, "queue-0"), ("2", 10.0, 60.0, 1, "queue-2")],
            {"need more units than a bot has": 1, "never ran": 1}),
    "csv": (GOOGLE, 1000, [("17-0", 0.0, 60.0, 2, "production")], {"never ran": 1}),
    "ali": (ALIBABA, 4, [("j_1/M1/0", 0.0, 60.0, 2, "type-1"), ("j_1/M1/1", 0.0, 60.0, 2, "type-1")], {"never ran": 1}),
    "gpu": (OPENB, 10, [("pod-1", 0.0, 90.0, 5, "ls")], {"need no units": 1}),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRACES)
def test_a_trace_tells_arrivals_run_times_and_what_could_not_be_repeated(kind: str, tmp_path: Path) -> None:
    text, capacity, jobs, left_out = TRACES[kind]
    path = tmp_path / f"trace.{kind}.gz"
    path.write_bytes(gzip.compress(text.encode()))
    past = read_trace(path, None if capacity is None else [PastBot("big", capacity)], span=3600.0)
    told = [
        (job.name, job.arrived - past.since, job.attempts[0].seconds, job.request["units"], job.request["instance"])
        for job in past.jobs
    ]
    assert (told, dict(past.left_out), past.until - past.since) == (jobs, left_out, 3600.0)
    if capacity is None:
        assert [(bot.name, bot.capacity) for bot in past.bots] == [("node-1", 4), ("node-2", 4)]
        assert [job.attempts[0].verdict for job in past.jobs] == ["succeeded", "failed"]
    else:
        with pytest.raises(BadInput, match="--bots: is needed"):
            read_trace(path, None, span=None)


def test_a_step_is_a_tenth_of_the_span_at_most_also_of_one_job_that_takes_no_time(tmp_path: Path) -> None:
    path = tmp_path / "one.swf"
    path.write_text("; MaxProcs: 4\n1 0 5 0 1 -1 -1 1 -1 -1 1 1 1 1 1 1 -1 -1\n")
    past = read_trace(path, None, span=None)
    assert (past.until - past.since, step_of(past, None), step_of(past, 0.1)) == (1.0, 0.001, 0.1)
    with pytest.raises(BadInput, match=r"--step: must be at most 100 ms, a tenth of what is repeated"):
        step_of(past, 0.2)
    long = replace(past, jobs=[replace(past.jobs[0], attempts=[Attempt(60.0, "succeeded")])])
    assert (step_of(long, None), step_of(replace(long, until=past.since + 60.0), None)) == (0.1, 3.0)


def test_what_is_no_trace_and_no_load_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    cases = {
        "a,b\n": "is none of SWF",
        "; MaxProcs: 1\n1 0 0 -1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n": "has no job that can be repeated; 1 never ran",
        "; MaxProcs: 1\n1 0 zero\n": "is not such a trace",
        "; MaxProcs: 1\n1 nan 0 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n": "1 have no time",
        "time,type,collection_id,instance_index\n9,0,1,1\n": "is not such a trace",
        f"{OPENB.partition(chr(10))[0]}\na,1,1,1,9,,L S,x,1,2,1\n": "is not such a trace",
    }
    for text, reason in cases.items():
        path.write_text(text)
        with pytest.raises(BadInput, match=reason):
            read_trace(path, None if text.startswith(";") else [PastBot("b", 9)], span=None)
    for job, reason in (
        ("units = 'x'", "units: input should be a valid integer"),
        ("unit = 1", "unit: there is no such field"),
        ("label = 'x', instance = 'X'", "instance: is not a name: use a-z"),
    ):
        path.write_text(f"[[bots]]\ncount = 1\n[[load]]\nper_hour = 3\nseconds = 1\njob = {{{job}}}\n")
        with pytest.raises(BadInput, match=rf"^load\.1\.job\.{reason}"):
            generate(path, seed=1)
    path.write_text("[[bots]]\ncount = 20000\n[[bots]]\ncount = 1\n")
    with pytest.raises(BadInput, match="load: is missing"):
        generate(path, seed=1)


def test_a_generated_load_is_as_described_and_equal_for_equal_seeds(tmp_path: Path) -> None:
    path = tmp_path / "spec.toml"
    path.write_text(
        "seconds = 36000\n[[bots]]\ncount = 3\ncapacity = 2\nproperties = {os = 'linux'}\n"
        "[[load]]\nper_hour = 600\nburst = 10\nseconds = 60\nspread = 4\nfailing = 0.1\nhints = 5\n"
        "job = {instance = 'red', priority = 3}\n"
    )
    past = generate(path, seed=7)
    assert generate(path, seed=7) == past != generate(path, seed=8)
    assert len(past.jobs) == pytest.approx(6000, rel=0.15)
    runs = sorted(job.attempts[-1].seconds for job in past.jobs)
    assert runs[len(runs) // 2] == pytest.approx(60.0, rel=0.1)
    assert runs[len(runs) * 95 // 100] == pytest.approx(240.0, rel=0.15)
    assert len({job.request["locality_hint"] for job in past.jobs}) == 5
    assert sum(len(job.attempts) > 1 for job in past.jobs) / len(past.jobs) == pytest.approx(0.1, abs=0.03)
    assert [bot.capacity for bot in past.bots] == [2, 2, 2]
    assert all(BEGIN <= job.arrived < BEGIN + 36000 for job in past.jobs)
    path.write_text("[[bots]]\ncount = 2\n")
    assert [bot.name for bot in read_bots(path)] == ["bot-1-1", "bot-1-2"]


def job(name: str, arrived: float, seconds: float = 10.0, **other: object) -> PastJob:
    values = {"cancelled": None, "begun": False, "is_over": True, "request": {"instance": "red"}} | other
    return PastJob(name=name, arrived=arrived, attempts=[Attempt(seconds, "succeeded")], **values)  # type: ignore[arg-type]


def test_a_past_is_shaken_gets_other_bots_and_goes_on() -> None:
    begin = replace(job("b", 0.0), begun=True, is_over=False, attempts=[Attempt(50.0, "succeeded")])
    waits_on = replace(job("w", 90.0), is_over=False)
    bots = [PastBot("a", 2), PastBot("b", 2), PastBot("c", 4)]
    lease = LeaseRecord("b", "red", 0, 1, "b1", 70.0, None, None)
    records = Records(0.0, 100.0, [], [lease], {}, 0, 8, 800.0, 0.0)
    past = Past(0.0, 100.0, [begin, *(job(str(n), n, float(n)) for n in range(1, 40)), waits_on], bots, 0, records)

    other = shaken(past, random.Random(1))
    assert {each.name for each in other.jobs} == {each.name for each in past.jobs}
    moved = {each.name: each.arrived for each in other.jobs}
    assert moved["b"] == 0.0
    assert all(abs(moved[each.name] - each.arrived) <= 5.0 for each in past.jobs)
    assert moved != {each.name: each.arrived for each in past.jobs}
    assert {each.attempts[0].seconds for each in other.jobs} <= {each.attempts[0].seconds for each in past.jobs}
    assert [each.arrived for each in other.jobs] == sorted(moved.values())

    assert [bot.capacity for bot in with_more(past, 2, None).bots] == [2, 2, 4, 2, 2]
    assert [bot.name for bot in with_more(past, -1, "a").bots] == ["a", "c"]
    for number, like, reason in ((-2, "c", "of bots like 'c' there are only 1"), (1, "x", "there is no bot 'x'")):
        with pytest.raises(BadInput, match=reason):
            with_more(past, number, like)

    after = onwards(past)
    assert (after.since, after.until, after.records) == (100.0, 200.0, None)
    assert [(each.name, each.arrived) for each in after.jobs[:3]] == [("b", 100.0), ("w", 100.0), ("1+", 101.0)]
    assert after.jobs[0].attempts == [Attempt(20.0, "succeeded")], "it ran for 30 s of its 50"
    assert after.jobs[-1].name == "w+"


def test_the_figures_say_what_was_lost_unmet_unfair_late_and_near() -> None:
    def of(name: str, queued: float, started: float | None, instance: str = "red", **other: object) -> JobRecord:
        values = {"finished": None if started is None else started + 10, "state": "succeeded", "hint": None} | other
        of_class = str(values.pop("job_class", "")) or None
        return JobRecord(name, instance, of_class, 0, queued, started, deadline=values.pop("deadline", None), **values)  # type: ignore[arg-type]

    jobs = [
        of("1", 0, 0, hint="h"), of("2", 0, 40, hint="h", job_class="serious", deadline=45.0),
        of("3", 50, None, state="queued", deadline=200.0), of("4", 10, None, state="cancelled", finished=20),
        of("5", 0, 0, "blue", finished=100),
    ]  # fmt: skip
    leases = [
        LeaseRecord("1", "red", 0, 2, "b1", 0.0, 10.0, "succeeded"),
        LeaseRecord("5", "blue", 0, 1, "b2", 0.0, 100.0, "lost"),
        LeaseRecord("2", "red", 0, 2, "b1", 40.0, 50.0, "succeeded"),
    ]  # fmt: skip
    records = Records(0.0, 100.0, jobs, leases, {(0, "red"): 2, (0, "blue"): 1}, 3, 4, 400.0, 0.0)
    found = measure(records)
    assert found.waits["red"].jobs == 3
    assert found.waits["red"].waiting == 1
    assert (found.waits["red"].p50, found.waits["red"].most) == (40.0, 50.0)
    assert list(found.classes) == ["serious"]
    assert (found.starts, found.evictions, found.utilisation) == (3, 3, 0.35)
    assert found.lost == pytest.approx(100 / 140)
    assert found.unmet == {"red": 80.0, "blue": 0.0}, "from 10 to 40 and from 50 on, while a job waited"
    red = 20 / (20 + 40 + 50 + 10)
    assert found.fairness == pytest.approx((red + 1) ** 2 / (2 * (red**2 + 1)))
    assert (found.late, found.due, found.near, found.hinted) == (1, 1, 1, 1)
    # What was before the span, and before what is judged: a job that waited and ran then, and a bot that left.
    early = [of("9", -50, -10, "blue"), of("8", -40, 5, "red")]
    begun = LeaseRecord("9", "blue", 0, 1, "b2", -10.0, 100.0, None)
    before = replace(records, jobs=early, leases=[begun, replace(begun, job="8", instance="red", granted=5.0)])
    assert measure(before).fairness == pytest.approx((1 + 0.95) ** 2 / (2 * (1 + 0.95**2)))
    assert (measure(before).waits["red"].most, measure(replace(before, waits_from=-45.0)).waits["red"].most) == (5, 45)
    assert measure(before, without={"9", "8"}).starts == 0
    later = replace(records, jobs=[of("1", 0, 30), *jobs[1:]])
    assert [(each.name, each.before, each.after) for each in losers(records, later)] == [("1", 0.0, 30.0)]
    assert sum(units_in_use(records, ["red"])["red"]) == pytest.approx(40 / (100 / 60))
    assert waits(records, [])["others"][0] == 0.0


def test_jobs_that_have_not_started_say_only_that_their_waits_are_longer(chance: random.Random) -> None:
    def measured(until: float) -> Waits:
        jobs = []
        for nth, (queued, start) in enumerate(times):
            started = None if start > until else start
            jobs.append(JobRecord(f"{nth}", "red", None, 0, queued, started, None, "queued", None, None))
        found = measure(Records(0.0, until, jobs, [], {}, 0, 1, 1.0, 0.0)).overall
        assert found is not None
        return found

    times = [(queued, queued + chance.expovariate(1 / 100)) for queued in (chance.uniform(0, 300) for _ in range(4000))]
    found, all_of_them = measured(300.0), measured(1e6)
    waits = sorted(start - queued for queued, start in times)
    assert (all_of_them.p50, all_of_them.p95, all_of_them.most) == (waits[1999], waits[3799], waits[-1])
    assert found.waiting > 1000
    assert found.p50 == pytest.approx(all_of_them.p50, rel=0.1), "the median of the waits so far is 50 s"
    assert (all_of_them.is_known("most"), found.is_known("p50"), found.is_known("most")) == (True, True, False)
    few = measured(50.0)
    assert (few.is_known("p95"), few.p95) == (False, few.most)


@pytest.mark.parametrize("wanted", [0.1, 2.35, 10 / 3])
def test_what_ends_some_steps_after_a_stop_of_the_clock_ends_at_a_stop(wanted: float) -> None:
    step = exact_step(wanted)
    assert abs(step - wanted) <= 1 / 128
    assert (step * 1e6).is_integer(), "the database counts microseconds"
    stops = [nth * step for nth in range(int(BEGIN / step), int(BEGIN / step) + 1000)]
    assert {stop + 7 * step for stop in stops[:-7]} <= {*stops}


@pytest.mark.parametrize("wanted", [0.001, 0.007, 0.008, 0.012, 0.0156, 0.023, 0.04, 0.07, 0.08])
def test_no_step_is_changed_by_more_than_a_tenth(wanted: float) -> None:
    assert exact_step(wanted) == pytest.approx(wanted, rel=0.1)
