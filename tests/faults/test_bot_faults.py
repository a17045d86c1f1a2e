"""Real bots are killed, stopped and doubled while they work: their jobs go on elsewhere, and never in two places."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import pytest

from schema import clock
from schema.timing import Timing
from tests.support.model import Journal, standing_pool
from tests.support.patience import MINUTE, eventually
from tests.support.pool import Pool
from tests.support.servers import Databases, Process, Processes

#: Of the first attempt and everything below it.
FIRST_FENCE = "LEASEHOLD_FENCE=1"
#: The first attempt stores a checkpoint, leaves a child that hides in a session of its own, and says again and again
#: that it runs, deaf to SIGTERM; the second one says so once, and leaves the checkpoint as its result.
SCRIPT = """
trap '' TERM
if [ "$LEASEHOLD_FENCE" = 1 ]; then
    echo '{"step": 7}' > "$LEASEHOLD_CHECKPOINT.new" && mv "$LEASEHOLD_CHECKPOINT.new" "$LEASEHOLD_CHECKPOINT"
    setsid sleep 600 &
    while :; do echo "$LEASEHOLD_FENCE $LEASEHOLD_BOT" >> "$EFFECTS"; sleep 0.02; done
fi
if [ -e "$LEASEHOLD_CHECKPOINT" ]; then cp "$LEASEHOLD_CHECKPOINT" "$LEASEHOLD_RESULT"; fi
echo "$LEASEHOLD_FENCE $LEASEHOLD_BOT" >> "$EFFECTS"
"""


@dataclass
class House:
    """A pool of real processes, and a file that the jobs of a test write to. Names of bots belong to one test each."""

    pool: Pool
    processes: Processes
    journal: Journal
    effects: Path

    def bot(self, name: str, *, place: str = "work") -> Process:
        """A bot in a work directory of that name; returns once its session is open, also if the name had one."""
        process = self.processes
        epoch = self.epoch(name)
        directory = str(process.directory / place)
        # The commands write to a file of the test.
        environment = {"LEASEHOLD_BOT_WORK_DIR": directory, "LEASEHOLD_BOT_JOB_USER": "agent"}
        arguments = ["bot", "--name", name, "--url", process.url, "--token-file", str(process.directory / "bot.token")]
        started = process.start(f"{name}-{place}", *arguments, environment=environment)
        eventually(lambda: self.epoch(name) > epoch, what=f"{name} has a session: {started.said()}")
        return started

    def epoch(self, name: str) -> int:
        return max(
            (row.epoch for row in self.pool.rows("SELECT epoch FROM bots WHERE name = :name", name=name)), default=0
        )

    def start_job(self) -> str:
        """A job whose first attempt runs, with all of its processes."""
        (job,) = self.journal.submit(
            1, payload={"command": ["sh", "-c", SCRIPT], "env": {"EFFECTS": str(self.effects)}}
        )
        eventually(lambda: self.pool.job(job).state == "running" and len(self.first_attempt()) >= 2)
        return job

    def first_attempt(self) -> list[int]:
        """Processes of the first attempt, wherever they hide."""
        marks = {f"EFFECTS={self.effects}".encode(), FIRST_FENCE.encode()}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if marks <= set((entry / "environ").read_bytes().split(b"\0")):
                        found.append(int(entry.name))
        return found

    def check(self, job: str, *, finished_by: str) -> None:
        """The second attempt has finished, on that bot, and the first one had no effect after it."""
        self.journal.check()
        row = self.pool.job(job)
        assert (row.state, row.attempts, row.result_fence) == ("succeeded", 2, row.fence)
        assert self.pool.history(job)[-1] == "finish"
        lines = self.effects.read_text().splitlines()
        last = f"{row.fence} {finished_by}"
        assert lines[-1] == last
        assert lines.count(last) == 1


#: A fifth of the production's patience.
TIMING = Timing(sync=0.5, ttl=6, reap=0.5, ack=5, poll=0.1)


@pytest.fixture(scope="module")
def standing(databases: Databases, template: str) -> Iterator[House]:
    """One pool for all tests."""
    with standing_pool(databases, template, TIMING) as (pool, processes):
        yield House(pool, processes, Journal(pool), processes.directory)


@pytest.fixture
def house(standing: House) -> Iterator[House]:
    """The pool without a bot; those of the test are killed after it, and their sessions given up."""
    processes, before = standing.processes, list(standing.processes.running)
    yield replace(standing, effects=standing.effects / uuid4().hex)
    for process in [each for each in processes.running if each not in before]:
        process.signal(signal.SIGKILL)
        process.popen.wait()
    standing.pool.change("UPDATE bots SET expires_at = now() WHERE status <> 'gone'")
    eventually(lambda: not standing.pool.rows("SELECT FROM bots WHERE status <> 'gone'"), what="the bots are gone")


def test_the_job_of_a_killed_bot_leaves_no_process_and_goes_on_in_time_from_its_checkpoint(house: House) -> None:
    bot = house.bot("killed")
    job = house.start_job()
    stored = "SELECT c.checkpoint FROM job_checkpoints c JOIN jobs j ON j.id = c.job_id WHERE j.public_id = :job"
    eventually(lambda: house.pool.rows(stored, job=job), what="the checkpoint is stored")
    bot.kill()
    killed_at = clock.monotonic()
    eventually(lambda: house.pool.job(job).state == "queued", TIMING.detect + MINUTE, what="queued again")
    print(f"queued again after {clock.monotonic() - killed_at:.2f} s of {TIMING.detect:.1f} s")
    assert house.first_attempt() == []
    house.bot("after-killed")
    house.journal.wait()
    house.check(job, finished_by="after-killed")
    assert house.pool.history(job).count("expire") == 1
    left = "SELECT r.fence, r.result FROM job_results r JOIN jobs j ON j.id = r.job_id WHERE j.public_id = :job"
    assert house.pool.row(left, job=job) == (house.pool.job(job).fence, {"step": 7})


def test_a_bot_that_was_stopped_past_its_session_cannot_finish_its_old_lease(house: House) -> None:
    stopped = house.bot("stopped")
    job = house.start_job()
    epoch = house.epoch("stopped")
    stopped.signal(signal.SIGSTOP)
    eventually(lambda: house.pool.job(job).state == "queued", TIMING.detect + MINUTE)
    assert house.first_attempt() == []
    other = house.bot("after-stopped")
    house.journal.wait()
    before = house.pool.job(job)
    stopped.signal(signal.SIGCONT)
    # Given up: one epoch further; back: another one.
    eventually(lambda: house.epoch("stopped") == epoch + 2, what="it comes back with a new session")
    house.check(job, finished_by="after-stopped")
    assert house.pool.job(job) == before
    assert other.end() == 0
    house.journal.submit(1, payload={"command": ["true"]})
    house.journal.wait()
    house.journal.check()
    assert stopped.end() == 0


def test_the_newer_of_two_agents_with_one_name_wins_and_runs_nothing_before_the_older_is_dead(house: House) -> None:
    older = house.bot("doubled", place="older")
    job = house.start_job()
    newer = house.bot("doubled", place="newer")
    assert older.popen.wait(MINUTE) == 4
    assert "another agent with this name has taken over" in older.said()
    house.journal.wait()
    house.check(job, finished_by="doubled")
    house.journal.submit(5, payload={"command": ["true"]})
    house.journal.wait()
    house.journal.check()
    assert newer.alive
    assert house.epoch("doubled") == 2


def test_an_agent_that_never_hears_that_it_was_superseded_is_dead_before_its_job_runs_again(house: House) -> None:
    older = house.bot("deaf")
    job = house.start_job()
    house.bot("after-deaf")
    # Its own deadline is all that ends its work now.
    older.signal(signal.SIGSTOP)
    house.pool.bot("deaf", capacity=0)
    assert house.first_attempt()
    house.journal.wait()
    assert house.first_attempt() == []
    house.check(job, finished_by="after-deaf")
    # A short job may be over before its bot has said that it began.
    moves = [move for move in house.pool.history(job) if move != "acknowledge"]
    assert moves == ["submit", "grant", "expire", "grant", "finish"]


def test_an_agent_that_restarts_in_its_place_goes_on_with_its_jobs_without_waiting(house: House) -> None:
    killed = house.bot("restarted")
    job = house.start_job()
    killed.kill()
    # Whoever cannot prove that nothing of it runs any more would have to wait for that long.
    house.pool.change("UPDATE bots SET expires_at = now() + interval '1 hour' WHERE status <> 'gone'")
    house.bot("restarted")
    assert house.first_attempt() == []
    house.journal.wait()
    house.check(job, finished_by="restarted")
