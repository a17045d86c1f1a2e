"""Recorded loads of other schedulers as pasts: SWF, Google's cluster of 2019, Alibaba's of 2018 and its GPU cluster.

A trace says when jobs arrived and how long they ran, and little of the bots. What has no meaning here is left out and
counted: `Past.left_out` says why. A job of Leasehold runs on one bot, so one that needs more units than any bot has is
left out too.
"""

import csv
import gzip
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO

from leasehold.errors import BadInput
from pydantic import ValidationError

from assigner.simulation.generated import BEGIN, MOST_SECONDS
from assigner.simulation.past import MOST_BOTS, MOST_JOBS, Attempt, Past, PastBot, PastJob
from schema.fields import first_error
from schema.requests import JobRequest

#: Why jobs of a trace are left out.
NEVER_RAN, NO_TIME, NO_UNITS, TOO_LARGE = (
    "never ran", "have no time of arrival", "need no units", "need more units than a bot has",
)  # fmt: skip
#: Units of a whole core, of a whole machine of Google's and of a whole GPU: the smallest part that jobs ask for.
UNITS_OF_MACHINE, UNITS_OF_GPU = 1000, 10
#: The seconds of a trace at least: its runs may all take none.
SHORTEST = 1.0


@dataclass(frozen=True)
class Traced:
    """One job of a trace. arrived: in seconds since any time. seconds: of its run. verdict: of its only attempt."""

    name: str
    arrived: float
    seconds: float
    units: int
    instance: str
    label: str = ""
    priority: int = 0
    verdict: str = "succeeded"


#: Yields the jobs of a trace, and for each that cannot be repeated, why.
Reader = Callable[[Iterable[str]], Iterator[Traced | str]]


def read_trace(path: Path, bots: Sequence[PastBot] | None, *, span: float | None) -> Past:
    """Read the trace at `path`, which may be packed by gzip. Its kind is found from its first line.

    bots: where its jobs run; None = those that the trace tells, as only SWF does. span: seconds of it that are repeated
    from its first arrival; None = until its runs would have ended without waits. Raises BadInput.
    """
    try:
        with _opened(path) as file:
            head = [*islice(file, 200)]
            read = _reader(head)
            told = bots if bots is not None else _told_bots(head)
            found, left_out = _first(read(chain(head, file)), span, max(bot.capacity for bot in told))
            later = _begin(head, found[0].arrived) - found[0].arrived if found else 0.0
            jobs = [_job(each, later) for each in found]
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise BadInput(str(path), f"cannot be read: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, csv.Error) as error:
        said = first_error(error)[1] if isinstance(error, ValidationError) else error
        raise BadInput(str(path), f"is not such a trace as its first line says: {said}") from None
    if not jobs:
        others = "".join(f"; {number:,} {why}" for why, number in left_out.items())
        raise BadInput(str(path), f"has no job that can be repeated{others}")
    since, last = jobs[0].arrived, max(job.arrived + job.attempts[-1].seconds for job in jobs)
    until = max(last, since + SHORTEST) if span is None else since + span
    return Past(since, until, jobs, told, left_out=left_out)


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        yield file


def _reader(head: Sequence[str]) -> Reader:
    first = next((line for line in head if line.strip()), "")
    if first.startswith(";") or len(first.split()) == 18:
        return _swf
    columns = {each.strip() for each in first.split(",")}
    if {"time", "type", "collection_id", "instance_index"} <= columns:
        return _google
    if {"name", "num_gpu", "gpu_milli", "creation_time"} <= columns:
        return _alibaba_gpu
    if len(first.split(",")) == 9:
        return _alibaba
    raise ValueError("it is none of SWF, Google 2019 instance_events, Alibaba 2018 batch_task, Alibaba openb_pod_list")


def _begin(head: Sequence[str], first: float) -> float:
    """When the first job arrives, in seconds since 1970. Many traces count from a time that they do not tell."""
    begin = _header(head).get("UnixStartTime", 0)
    return first + begin if begin > 0 else BEGIN


def _header(head: Sequence[str]) -> dict[str, int]:
    """The whole numbers in the header of an SWF file."""
    told = {}
    for line in head:
        name, colon, value = line.lstrip("; ").partition(":")
        if line.startswith(";") and colon and value.split() and value.split()[0].isdigit():
            told[name.strip()] = int(value.split()[0])
    return told


def _told_bots(head: Sequence[str]) -> list[PastBot]:
    """The bots that the header of an SWF file tells. Raises BadInput if it tells none."""
    told = _header(head)
    processors = told.get("MaxProcs", 0)
    if processors < 1:
        raise BadInput("--bots", "is needed, because the trace does not say which machines there were")
    nodes = max(1, told.get("MaxNodes", 1))
    if nodes > MOST_BOTS:
        raise BadInput(
            "--bots", f"is needed: the trace has {nodes:,} nodes, and a simulation at most {MOST_BOTS:,} bots"
        )
    capacity = max(1, processors // nodes)
    return [PastBot(f"node-{nth}", capacity) for nth in range(1, nodes + 1)]


def _first(traced: Iterator[Traced | str], span: float | None, largest: int) -> tuple[list[Traced], dict[str, int]]:
    """The jobs of the first `span` seconds in order, and how many others the trace has, by what is wrong with them.

    Raises BadInput if there are too many.
    """
    left_out = Counter[str]()
    found: list[Traced] = []
    first = math.inf
    for job in traced:
        if isinstance(job, str):
            left_out[job] += 1
        elif not (math.isfinite(job.arrived) and 0.0 <= job.seconds <= MOST_SECONDS):
            left_out[NO_TIME] += 1
        elif job.units > largest:
            left_out[TOO_LARGE] += 1
        elif span is None or job.arrived < first + span:
            first = min(first, job.arrived)
            found.append(job)
        if len(found) > 2 * MOST_JOBS:
            found = _within(found, first, span)
    found = _within(found, first, span)
    found.sort(key=lambda job: (job.arrived, job.name))
    return found, dict(left_out)


def _within(found: list[Traced], first: float, span: float | None) -> list[Traced]:
    kept = found if span is None else [job for job in found if job.arrived < first + span]
    if len(kept) > MOST_JOBS:
        raise BadInput("--span", f"more than {MOST_JOBS:,} jobs arrive: choose a shorter span")
    return kept


def _job(traced: Traced, later: float) -> PastJob:
    request = JobRequest.model_validate(
        {
            "command": ["true"],
            "instance": traced.instance,
            "label": traced.label,
            "units": traced.units,
            "priority": traced.priority,
        }
    ).normal()
    attempts = [Attempt(traced.seconds, traced.verdict)]
    return PastJob(traced.name, traced.arrived + later, None, False, True, request, attempts)


def _swf(lines: Iterable[str]) -> Iterator[Traced | str]:
    """Standard Workload Format 2.2: D. Feitelson, cs.huji.ac.il/labs/parallel/workload/swf.html. Fields from 1."""
    for line in lines:
        fields = line.split()
        if not fields or line.startswith(";"):
            continue
        if fields[10] in ("2", "3", "4"):
            continue  # a part of the run of a job that has a line of its own
        number, submitted, seconds = fields[0], float(fields[1]), float(fields[3])
        units = next((int(fields[n]) for n in (7, 4) if int(fields[n]) > 0), 0)
        if seconds < 0:
            yield NEVER_RAN
        elif units < 1:
            yield NO_UNITS
        else:
            queue, user = max(0, int(fields[14])), max(0, int(fields[11]))
            verdict = "failed" if fields[10] == "0" else "succeeded"
            yield Traced(number, submitted, seconds, units, f"queue-{queue}", f"user-{user}", 0, verdict)


#: Numbers of the events of Google's instances that are used here.
_SUBMIT, _SCHEDULE, _EVICT, _FAIL, _FINISH, _KILL, _LOST = 0, 3, 4, 5, 6, 7, 8
#: The least priority of each tier, the highest tier first.
_TIERS = ((360, "monitoring"), (120, "production"), (116, "mid"), (110, "best-effort"), (0, "free"))


def _google(lines: Iterable[str]) -> Iterator[Traced | str]:
    """Rows of `instance_events` of Google's clusters of 2019: M. Tirmazi and others, "Borg: the next generation", 2020.

    One job for each time that an instance was submitted and ended: it arrives at the first submit, also if it was
    evicted in between, and runs from its last start. Tiers are instances, and the processors that were asked for are
    units of a thousandth of the largest machine. Times are in microseconds; 0 means before the trace, and 2^63 - 1
    after it. The rows must be in the order of their times.
    """
    waiting: dict[tuple[str, str], tuple[float, int, str, int]] = {}
    running: dict[tuple[str, str], float] = {}
    runs = Counter[tuple[str, str]]()
    latest = 0.0
    for row in csv.DictReader(lines):
        key, kind, at = (row["collection_id"], row["instance_index"]), int(row["type"]), int(row["time"]) / 1e6
        if at > MOST_SECONDS:
            continue
        if at < latest:
            raise ValueError("its rows are not in the order of their times")
        latest = at
        if kind == _SUBMIT and key in waiting:
            continue
        if kind == _SUBMIT:
            cores = float(row.get("resource_request.cpus") or row.get("cpus") or 0.0)
            priority = max(0, int(row["priority"] or 0))
            tier = next(name for least, name in _TIERS if priority >= least)
            waiting[key] = (at, math.ceil(cores * UNITS_OF_MACHINE), tier, priority)
        elif kind == _SCHEDULE:
            running[key] = at
        elif kind in (_FAIL, _FINISH, _KILL, _LOST) and key in waiting:
            arrived, units, tier, priority = waiting.pop(key)
            runs[key] += 1
            started = running.pop(key, None)
            if started is None:
                yield NEVER_RAN
            elif arrived <= 0.0:
                yield NO_TIME
            elif units < 1:
                yield NO_UNITS
            else:
                verdict = "failed" if kind == _FAIL else "succeeded"
                name = "-".join(key) + (f"-{runs[key]}" if runs[key] > 1 else "")
                yield Traced(name, arrived, at - started, units, tier, "", -priority, verdict)
    yield from (NEVER_RAN for _ in waiting)


def _alibaba(lines: Iterable[str]) -> Iterator[Traced | str]:
    """`batch_task.csv` of Alibaba's cluster of 2018: columns without a header, one row for some equal instances.

    It does not tell when a task was submitted, so its jobs arrive when they started. 100 of `plan_cpu` are a core,
    which is a unit.
    """
    for name, instances, job, kind, status, start, end, cores, _ in csv.reader(lines):
        if status not in ("Terminated", "Failed") or not start or not end or int(end) < int(start) or int(start) <= 0:
            yield NEVER_RAN
            continue
        units = math.ceil(float(cores or 0.0) / 100.0)
        verdict = "failed" if status == "Failed" else "succeeded"
        for nth in range(int(instances or 1)):
            if not units:
                yield NO_UNITS
                continue
            at, seconds = float(start), float(int(end) - int(start))
            yield Traced(f"{job}/{name}/{nth}", at, seconds, units, f"type-{kind}", "", 0, verdict)


def _alibaba_gpu(lines: Iterable[str]) -> Iterator[Traced | str]:
    """`openb_pod_list_*.csv` of Alibaba's cluster with GPUs of 2023. A tenth of a GPU is a unit; classes of service are
    instances. Pods without a GPU are left out."""
    for row in csv.DictReader(lines):
        gpus, share = int(row["num_gpu"] or 0), int(row["gpu_milli"] or 0)
        units = math.ceil(gpus * share * UNITS_OF_GPU / 1000)
        started, ended = row["scheduled_time"], row["deletion_time"]
        if units < 1:
            yield NO_UNITS
        elif not started or not ended:
            yield NEVER_RAN
        else:
            arrived, seconds = float(row["creation_time"]), max(0.0, float(ended) - float(started))
            verdict = "failed" if row["pod_phase"] == "Failed" else "succeeded"
            yield Traced(row["name"], arrived, seconds, units, row["qos"].lower() or "default", "", 0, verdict)
