"""Sampling and the fall-backs around it, and what is remembered of where work ran."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

from assigner.placement import sampling
from assigner.placement.capacity import Capacity
from assigner.placement.sampling import CROWD, SKIPPED, OfferCache
from assigner.placement.strategy import Policy, SamplingSettings, Snapshot
from schema.fleet import bulk_candidates, candidates
from schema.fleet.bulk_candidates import PARTS
from schema.fleet.candidates import CandidateRequest, FreeBot
from schema.moves.grant import grant
from schema.picking import ready
from schema.picking.pick import Order, ReadyJob
from schema.picking.ready import Scope
from tests.support import filling
from tests.support.explain import explained, gates_of
from tests.support.pool import Bot, Pool, active, completed


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sample sizes that were asked for, one entry for each sampling round."""
    found: list[int] = []
    read = candidates.sample

    def counted(
        connection: Connection, wanted: Sequence[CandidateRequest], *, chance: random.Random
    ) -> list[list[FreeBot]]:
        found.append(wanted[0].count)
        return read(connection, wanted, chance=chance)

    monkeypatch.setattr(candidates, "sample", counted)
    return found


def test_bg_30_a_sample_is_bounded_random_and_read_without_locks(pool: Pool) -> None:
    for number in range(12):
        pool.bot(f"bot-{number}")
    pool.submit()
    seen: set[str] = set()
    with pool.database.engine.connect() as other:
        other.exec_driver_sql("SELECT 1 FROM bots FOR UPDATE")
        with pool.database.engine.begin() as connection:
            jobs = ready.pick(connection, ready.Scope(), order=ready.Order.PRIORITY, batch=1, chance=pool.chance)
            for _ in range(40):
                found = sampling.sample_snapshot(
                    connection, jobs, sample_size=3, offer_cache=OfferCache(), chance=pool.chance
                )
                (bots,) = found.candidates
                assert len({bot.id for bot in bots}) == 3
                seen |= {bot.name for bot in bots}
        other.rollback()
    assert len(seen) > 6


@pytest.mark.parametrize("strategy", ["capacity", "locality"])
@pytest.mark.parametrize("attempts", [1, 3])
def test_bg_31_bg_32_a_04_after_the_last_round_any_healthy_bot_will_do(
    pool: Pool, rounds: list[int], attempts: int, strategy: str
) -> None:
    (job,) = pool.submit()
    pool.bot("best", priority=-5)
    pool.bot("spare", priority=5)
    settings: dict[str, Any] = {"kind": strategy, "sampling": {"sample_size": 4, "max_attempts": attempts}}
    with pool.database.engine.connect() as other:
        other.exec_driver_sql("SELECT 1 FROM bots WHERE name = 'best' FOR UPDATE")
        pool.assigner(strategy=settings).run_once()
        other.rollback()
    assert rounds == [4] * attempts
    decision = pool.row("SELECT details FROM job_events WHERE move = 'grant'").details
    assert (decision["bot"], decision["round"]) == ("spare", 0)
    assert pool.queue_of(job).looks == 0


def test_a_04_only_a_job_that_not_even_any_healthy_bot_could_take_backs_off(pool: Pool) -> None:
    (job,) = pool.submit(units=2)
    pool.bot("small")
    pool.assigner().run_once()
    row = pool.queue_of(job)
    assert (pool.job(job).state, row.looks, row.schedule_after is None) == ("queued", 1, False)


def test_bg_32_one_round_is_the_default() -> None:
    assert SamplingSettings() == SamplingSettings(sample_size=10, max_attempts=1)


def worked(pool: Pool, bot: Bot, hints: Sequence[str], verdict: str = "succeeded") -> None:
    """The bot gets one job after another for each hint, and they end so."""
    for hint in hints:
        pool.submit(locality_hint=hint)
        (work,) = pool.given(bot)
        bot.sync(completed(work, verdict))


def remembered(pool: Pool) -> list[str]:
    return [row.hint for row in pool.rows("SELECT hint FROM bot_localities ORDER BY seq")]


def test_bg_39_a_bot_keeps_the_hints_of_its_ten_latest_successes(pool: Pool) -> None:
    bot = pool.bot(sync_service=pool.sync_service(enabled=False))
    worked(pool, bot, [f"repo-{number}" for number in range(11)])
    assert remembered(pool) == [f"repo-{number}" for number in range(1, 11)]
    worked(pool, bot, ["repo-1"])
    assert remembered(pool) == [f"repo-{number}" for number in (*range(2, 11), 1)]


@pytest.mark.parametrize(("limit", "kept"), [(0, []), (2, ["b", "c"])])
def test_bg_39_the_limit_is_a_setting_and_nought_turns_it_off(pool: Pool, limit: int, kept: list[str]) -> None:
    worked(
        pool, pool.bot(sync_service=pool.sync_service(enabled=False, bot_locality_hint_limit=limit)), ["a", "b", "c"]
    )
    assert remembered(pool) == kept


def test_bg_39_a_job_that_failed_leaves_no_hint(pool: Pool) -> None:
    worked(pool, pool.bot(sync_service=pool.sync_service(enabled=False)), ["a"], verdict="failed")
    assert remembered(pool) == []


def test_the_pace_of_retries_is_a_setting(pool: Pool) -> None:
    (job,) = pool.submit()
    bot = pool.bot(sync_service=pool.sync_service(retry_base=100.0, retry_cap=150.0))
    pool.assigner().run_once()
    waits = []
    for _ in range(2):
        (work,) = bot.sync()["leases"]
        bot.sync(active(work))
        bot.sync(completed(work, "error"))
        row = pool.row("SELECT extract(epoch FROM schedule_after - now()) AS wait FROM jobs")
        waits.append(float(row.wait))
        pool.change("UPDATE jobs SET schedule_after = NULL")
        pool.assigner().run_once()
    assert 95 < waits[0] <= 100
    assert 145 < waits[1] <= 150
    assert pool.job(job).attempts == 3


# Candidates for many groups of jobs at once: able ones only, as many as there are, others for every group.


JOBS = """
SELECT id, public_id::text AS public_id, queue, cohort, instance, platform, priority, units, locality_hint,
    false AS tried
FROM jobs WHERE state = 'queued' ORDER BY id
"""
# What a candidate has to be, in words that no statement of ours uses.
ABLE = text("""
SELECT b.id FROM bots b JOIN instances i ON i.id = :instance JOIN platforms p ON p.id = :platform
WHERE b.properties @> p.properties AND b.status = 'ok' AND NOT b.draining AND b.capacity - b.in_use >= :units
    AND b.cohort = :cohort AND coalesce(b.instance, i.id) = i.id AND coalesce(b.pool, i.pool, '') = coalesce(i.pool, '')
    AND (b.pool IS NULL OR i.pool IS NOT NULL)
""")
LETTERS = tuple("abcdef")


def waiting(pool: Pool) -> list[ReadyJob]:
    return [ReadyJob(**row._mapping) for row in pool.rows(JOBS)]


def sampled(
    connection: Connection, jobs: Sequence[ReadyJob], offer_cache: OfferCache, *, seed: int, size: int = 5
) -> Snapshot:
    return sampling.sample_snapshot(
        connection, jobs, sample_size=size, offer_cache=offer_cache, chance=random.Random(seed)
    )


@pytest.fixture
def motley(pool: Pool) -> list[ReadyJob]:
    """Jobs of every cohort, instance, requirement set and size; bots for most of them, of ten kinds, half of the idle
    ones for one instance or one pool only, every third larger."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=5, kinds=LETTERS)
        filling.fill_jobs(connection, 60, instances=5, kinds=LETTERS)
        filling.fill_jobs(connection, 30, instances=5, kinds=LETTERS, units=2)
        filling.fill_bots(connection, {letter: 3 + 5 * nth for nth, letter in enumerate("abcde")})
        filling.occupy(connection, "b", leaving=2)

    pool.database.run(fill)
    pool.change("INSERT INTO cohorts (id, name, position) VALUES (1, 'left', 1), (2, 'right', 2)")
    pool.change(
        "UPDATE jobs SET cohort = 1 + id % 2, queue = queue_in_cohort(queue, (1 + id % 2)::integer)"
        " WHERE state = 'queued'"
    )
    pool.change("UPDATE instances SET pool = 'shared' WHERE name IN ('i-3', 'i-4')")
    pool.change(
        "UPDATE bots b SET cohort = 1 + b.id % 2, capacity = greatest(b.in_use, 1 + (b.id % 3 = 0)::integer),"
        " instance = CASE WHEN b.id % 4 = 0 AND b.in_use = 0"
        " THEN (SELECT id FROM instances WHERE name = 'i-' || b.id % 3) END,"
        " pool = CASE WHEN b.id % 4 = 1 AND b.in_use = 0 THEN 'shared' END,"
        ' properties = CASE b.id % 5 WHEN 0 THEN properties || \'{"host": ["x"]}\' ELSE properties END'
    )
    pool.change("UPDATE bot_platforms p SET cohort = b.cohort FROM bots b WHERE b.id = p.bot_id")
    pool.change("UPDATE leases l SET cohort = b.cohort FROM bots b WHERE b.id = l.bot_id AND l.ended_at IS NULL")
    pool.change(
        "UPDATE jobs j SET cohort = l.cohort, queue = queue_in_cohort(queue, l.cohort)"
        " FROM leases l WHERE l.job_id = j.id AND l.ended_at IS NULL"
    )
    return waiting(pool)


@pytest.mark.parametrize("margin", [candidates.MAX_BOTS_READ, 1], ids=["all in the window", "few in the window"])
@pytest.mark.parametrize("kinds", [sampling.SORTED, 0], ids=["sorted", "one after another"])
def test_candidates_are_able_and_as_many_as_there_are(
    pool: Pool, motley: list[ReadyJob], monkeypatch: pytest.MonkeyPatch, margin: int, kinds: int
) -> None:
    monkeypatch.setattr(sampling, "MAX_BOTS_READ", margin)
    monkeypatch.setattr(sampling, "SORTED", kinds)
    offer_cache = OfferCache()
    with pool.database.engine.connect() as connection:
        for seed in range(8):
            seen = sampled(connection, motley, offer_cache, seed=seed)
            assert len(seen.groups) > sampling.FEW
            for group, found in zip(seen.groups, seen.candidates, strict=True):
                want = group.wanted(5)
                able = {row.id for row in connection.execute(ABLE, vars(want))}
                ids = {bot.id for bot in found}
                assert ids <= able
                assert len(ids) == len(found) == min(want.count, len(able)), group


@pytest.mark.parametrize(
    "margin", [candidates.MAX_BOTS_READ, 5_000], ids=["rarely in the window", "always in the window"]
)
def test_the_only_bot_in_two_thousand_that_offers_something_is_found(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, margin: int
) -> None:
    monkeypatch.setattr(sampling, "MAX_BOTS_READ", margin)
    kinds = tuple(f"common-{number}" for number in range(8))

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=("rare", *kinds))
        filling.fill_jobs(connection, 9, instances=1, kinds=("rare", *kinds))
        filling.fill_bots(connection, {"rare": 1, **dict.fromkeys(kinds, 250)})

    pool.database.run(fill)
    rare = pool.row("SELECT id FROM platforms WHERE properties->'kind'->>0 = 'rare'").id
    offer_cache = OfferCache()
    with pool.database.engine.connect() as connection:
        for seed in range(10):
            seen = sampled(connection, waiting(pool), offer_cache, seed=seed)
            assert len(seen.groups) == 9
            for group, found in zip(seen.groups, seen.candidates, strict=True):
                assert [bot.name for bot in found] == ["rare-1"] if group.platform == rare else len(found) == 5


def test_groups_draw_different_bots_and_each_job_gets_its_own(pool: Pool) -> None:
    jobs, bots = 100, 400

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=jobs, kinds=("free",))
        filling.fill_jobs(connection, jobs, instances=jobs, kinds=("free",))
        filling.fill_bots(connection, {"free": bots})

    pool.database.run(fill)
    with pool.database.engine.connect() as connection:
        seen = sampled(connection, waiting(pool), OfferCache(), seed=1)
    assert len(seen.groups) == jobs
    assert len({frozenset(bot.id for bot in found) for found in seen.candidates}) == jobs
    drawn = Counter(bot.id for found in seen.candidates for bot in found)
    # 500 draws from 356 bots: a uniform draw meets 269 of them on average, and hardly any more than seven times.
    assert len(drawn) > 230
    assert max(drawn.values()) <= 10
    placed = Capacity().choose(seen, Policy(), how={})
    assert len({placement.bot_id for placement in placed}) == len(placed) == jobs


def test_groups_that_compete_for_the_few_bots_of_a_window_are_shown_others(pool: Pool) -> None:
    kinds = tuple(f"fine-{number}" for number in range(60))

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=("coarse", *kinds))
        filling.fill_jobs(connection, len(kinds), instances=1, kinds=kinds)
        filling.fill_bots(connection, {"coarse": 2_000, kinds[0]: 200})

    pool.database.run(fill)
    pool.change(
        "UPDATE bots SET properties = jsonb_build_object('kind', CAST(:kinds AS text[])) WHERE name LIKE 'fine%'",
        kinds=list(kinds),
    )
    pool.change(
        "INSERT INTO bot_platforms (platform, bot_id, sample_key) SELECT p.id, b.id, b.sample_key FROM bots b"
        " JOIN platforms p ON b.properties @> p.properties WHERE b.name LIKE 'fine%' ON CONFLICT DO NOTHING"
    )
    jobs, offer_cache = waiting(pool), OfferCache()
    with pool.database.engine.connect() as connection:
        for seed in range(3):
            seen = sampled(connection, jobs, offer_cache, seed=seed)
            placed = Capacity().choose(seen, Policy(), how={})
            # Of 57 on average; if all drew from the fifty in the window without regard to the others, it were 34.
            assert len({placement.bot_id for placement in placed}) == len(placed) > 45


def test_bots_for_one_tenant_among_many_are_found_among_thousands_for_another(pool: Pool) -> None:
    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=40, kinds=("free",))
        filling.fill_jobs(connection, 40, instances=40, kinds=("free",))
        filling.fill_bots(connection, {"free": 3_000})

    pool.database.run(fill)
    pool.change("UPDATE instances SET pool = 'one' WHERE name = 'i-3'")
    pool.change("UPDATE bots SET instance = (SELECT id FROM instances WHERE name = 'i-0')")
    pool.change("UPDATE bots SET instance = NULL, pool = 'one' WHERE name = 'free-7'")
    pool.change("UPDATE bots SET instance = (SELECT id FROM instances WHERE name = 'i-9') WHERE name = 'free-2000'")
    names = {row.id: row.name for row in pool.rows("SELECT id, name FROM instances")}
    with pool.database.engine.connect() as connection:
        for seed in range(5):
            seen = sampled(connection, waiting(pool), OfferCache(), seed=seed)
            found = {
                names[group.instance]: [bot.name for bot in bots]
                for group, bots in zip(seen.groups, seen.candidates, strict=True)
                if bots
            }
            assert len(found.pop("i-0")) == 5
            assert found == {"i-3": ["free-7"], "i-9": ["free-2000"]}


def six_kinds_of_jobs(pool: Pool) -> list[ReadyJob]:
    for letter in LETTERS:
        pool.submit(properties={"kind": letter})
    return waiting(pool)


def test_a_bot_whose_properties_have_changed_since_is_not_given_what_it_no_longer_offers(pool: Pool) -> None:
    jobs, offer_cache = six_kinds_of_jobs(pool), OfferCache()
    pool.bot("b", capacity=10, properties={"kind": list(LETTERS)})
    with pool.database.engine.connect() as connection:
        before = sampled(connection, jobs, offer_cache, seed=1)
        assert [len(found) for found in before.candidates] == [1] * 6
        pool.bot("b", capacity=10, properties={"kind": ["a"]})
        placements = Capacity().choose(before, Policy(), how={})
        granted = grant(connection, placements, assigner="test", strategy="test", ack=1)
        assert [lease.job_id for lease in granted] == [jobs[0].id]
        connection.rollback()
        after = sampled(connection, jobs, offer_cache, seed=1)
        assert [len(found) for found in after.candidates] == [1, 0, 0, 0, 0, 0]


def test_an_assigner_that_knew_a_bot_places_by_what_it_offers_now(pool: Pool) -> None:
    assigner = pool.assigner()
    bot = pool.bot("b", capacity=10, properties={"kind": list(LETTERS)})
    six_kinds_of_jobs(pool)
    assigner.run_once()
    assert len(bot.take()) == 6
    pool.bot("b", capacity=10, properties={"kind": ["a", "c"]})
    for letter in LETTERS:
        pool.submit(properties={"kind": letter}, label="late")
    assigner.run_once()
    late = pool.rows(
        "SELECT p.properties->'kind'->>0 AS kind FROM jobs j JOIN platforms p ON p.id = j.platform"
        " WHERE j.label = 'late' AND j.state = 'leased' ORDER BY 1"
    )
    assert [row.kind for row in late] == ["a", "c"]


def test_two_statements_do_for_any_number_of_groups_once_the_kinds_are_known(pool: Pool) -> None:
    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=50, kinds=LETTERS)
        filling.fill_jobs(connection, 300, instances=50, kinds=LETTERS)
        filling.fill_bots(connection, dict.fromkeys(LETTERS, 20))

    pool.database.run(fill)
    jobs, offer_cache, statements = waiting(pool), OfferCache(), list[str]()
    event.listen(
        pool.database.engine, "before_cursor_execute", lambda _c, _k, statement, *_: statements.append(statement)
    )
    counts = []
    with pool.database.engine.connect() as connection:
        for seed in range(3):
            statements.clear()
            seen = sampled(connection, jobs, offer_cache, seed=seed)
            assert [len(found) for found in seen.candidates] == [5] * 300
            counts.append(len(statements))
    assert counts == [3, 2, 2]


def test_what_is_known_of_a_kind_holds_for_bots_that_come_later(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, offer_cache = six_kinds_of_jobs(pool), OfferCache()
    pool.bot("early", properties={"kind": ["a", "b"]})
    with pool.database.engine.connect() as connection:
        sampled(connection, jobs, offer_cache, seed=1)
        pool.bot("late", properties={"kind": ["b", "a"]})
        monkeypatch.setattr(bulk_candidates, "read_offers", None)
        assert [len(found) for found in sampled(connection, jobs, offer_cache, seed=1).candidates] == [2, 2, 0, 0, 0, 0]


def test_the_memory_of_an_assigner_is_bounded() -> None:
    offer_cache = OfferCache(limit=10)
    for kind in range(25):
        offer_cache.learn([(1, kind, True), (2, kind, False)])
        assert len(offer_cache.of(1)) + len(offer_cache.of(2)) <= 10
        offer_cache.record_shortage((0, 0, kind, 1))
        assert offer_cache.of(1)[kind]
        assert not offer_cache.of(2)[kind]


def test_a_group_that_falls_short_again_and_again_is_left_out_ever_longer_but_never_for_good() -> None:
    offer_cache, group = OfferCache(), (0, 1, 7, 1)
    pauses = []
    for _ in range(8):
        offer_cache.record_shortage(group)
        pauses.append(next(turn for turn in range(100) if not offer_cache.is_skipped(group)))
    assert pauses == [1, 2, 4, 8, 16, SKIPPED, SKIPPED, SKIPPED]
    offer_cache.record_enough(group)
    assert not offer_cache.is_skipped(group)


# Assigners with much to place keep to parts of the bots, and only as long as these suffice.


SAMPLE = 5
BOTS = 20 * PARTS


@pytest.fixture
def many(pool: Pool) -> Pool:
    """Many bots and many jobs."""
    pool.submit(4 * CROWD, properties={"kind": "one"})
    pool.database.run(lambda connection: filling.fill_bots(connection, {"one": BOTS}))
    return pool


def sampled_parts(pool: Pool, connection: Connection, jobs: int) -> set[int]:
    """The bots that somebody who places so many jobs looks at."""
    picked = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=jobs, chance=pool.chance)
    assert len(picked) == jobs
    seen = sampling.sample_snapshot(
        connection, picked, sample_size=SAMPLE, offer_cache=OfferCache(), chance=random.Random(pool.chance.random())
    )
    (found,) = seen.candidates
    return {bot.id for bot in found}


def widen(pool: Pool, capacity: int) -> None:
    pool.change("UPDATE bots SET capacity = :capacity", capacity=capacity)


def test_those_who_place_many_jobs_at_once_look_at_different_bots(many: Pool) -> None:
    widen(many, 100)
    with many.database.engine.begin() as one, many.database.engine.begin() as other:
        first, second = sampled_parts(many, one, CROWD), sampled_parts(many, other, CROWD)
    assert min(len(first), len(second)) >= SAMPLE
    assert not first & second


def test_where_a_part_has_not_plenty_of_room_all_bots_are_looked_at(many: Pool) -> None:
    widen(many, 1)
    with many.database.engine.begin() as one:
        found = sampled_parts(many, one, 2 * CROWD)
    assert len(found) == SAMPLE + 2 * CROWD - 1


def test_who_finds_all_parts_claimed_does_without(many: Pool) -> None:
    widen(many, 100)
    with many.database.engine.begin() as others, many.database.engine.begin() as one:
        everything = text(
            "SELECT pg_advisory_xact_lock(hashtext('leasehold.part'), n) FROM generate_series(0, :last) n"
        )
        others.execute(everything, {"last": PARTS - 1})
        found = sampled_parts(many, one, CROWD)
    assert len(found) == SAMPLE + CROWD - 1


# Few bots that serve a tenant are found among thousands that serve others only.


BOTS_FEW_BOTS, TRIES = 3_000, 5
KIND = {"kind": ["free"]}


@pytest.fixture(params=["instance", "pool", "all"])
def crowded(request: pytest.FixtureRequest, pool: Pool) -> str:
    """Three thousand free bots serve team-b, and one serves team-a: it alone, its pool, or everybody. A job waits."""

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=("free",))
        filling.fill_bots(connection, {"free": BOTS_FEW_BOTS})

    pool.database.run(fill)
    pool.change("SELECT intern_instance('team-b')")
    (job,) = pool.submit(instance="team-a", properties=KIND)
    pool.change("UPDATE instances SET pool = 'one' WHERE name = 'team-a'")
    pool.change("UPDATE bots SET instance = (SELECT id FROM instances WHERE name = 'team-b')")
    serves = {"instance": "(SELECT id FROM instances WHERE name = 'team-a')", "pool": "NULL", "all": "NULL"}
    of_pool = "'one'" if request.param == "pool" else "NULL"
    pool.change(f"UPDATE bots SET instance = {serves[request.param]}, pool = {of_pool} WHERE name = 'free-1500'")
    return job


def test_the_few_bots_of_a_tenant_are_found_wherever_a_look_begins(pool: Pool, crowded: str) -> None:
    with pool.database.engine.connect() as connection:
        for seed in range(TRIES):
            chance = random.Random(seed)
            (job,) = ready.pick(connection, Scope(), order=Order.PRIORITY, batch=10, chance=chance)
            want = CandidateRequest(job.cohort, job.instance, job.platform, units=1, count=10)
            (found,) = candidates.sample(connection, [want], chance=chance)
            assert [bot.name for bot in found] == ["free-1500"]
            assert [bot.name for bot in candidates.any_free(connection, want)] == ["free-1500"]
            connection.rollback()


@pytest.mark.parametrize("instances", [None, ["team-a"]])
def test_explain_sees_the_few_bots_of_a_tenant(pool: Pool, crowded: str, instances: list[str] | None) -> None:
    found = explained(pool, crowded, instances=instances)
    assert found.sentence.startswith("nothing stands in its way")
    seen = gates_of(found)["cohort"].evidence
    assert (seen["present"], seen["healthy"]) == ((1, 1) if instances else (1001, 1001))


def test_a_tenant_with_only_full_bots_is_told_of_those(pool: Pool, crowded: str) -> None:
    pool.assigner().run_once()
    (late,) = pool.submit(instance="team-a", properties=KIND)
    assert [
        gate for gate, answer in gates_of(explained(pool, late, instances=["team-a"])).items() if not answer.open
    ] == ["room"]
    with pool.database.engine.connect() as connection:
        assert not ready.pick(connection, Scope(), order=Order.PRIORITY, batch=10, chance=pool.chance)
