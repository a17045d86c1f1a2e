"""Candidates for many groups of jobs at once: able ones only, as many as there are, others for every group."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from sqlalchemy import Connection, event, text

from assigner import drawing, snapshot
from assigner.capacity import Capacity
from assigner.offers import SKIPPED, Offers
from assigner.strategies import Policy, Snapshot
from schema import moves, windows
from schema.ready import ReadyJob
from tests import filling
from tests.pool import Pool

JOBS = """
SELECT id, public_id::text AS public_id, cohort, instance, platform, priority, units, locality_hint, considered
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


def sampled(connection: Connection, jobs: Sequence[ReadyJob], offers: Offers, *, seed: int, size: int = 5) -> Snapshot:
    return snapshot.sampled(connection, jobs, sample_size=size, offers=offers, chance=random.Random(seed))


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
    pool.change("UPDATE jobs SET cohort = 1 + id % 2 WHERE state = 'queued'")
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
    pool.change("UPDATE jobs j SET cohort = l.cohort FROM leases l WHERE l.job_id = j.id AND l.ended_at IS NULL")
    return waiting(pool)


@pytest.mark.parametrize("margin", [drawing.LOOK, 1], ids=["all in the window", "few in the window"])
@pytest.mark.parametrize("kinds", [drawing.SORTED, 0], ids=["sorted", "one after another"])
def test_candidates_are_able_and_as_many_as_there_are(
    pool: Pool, motley: list[ReadyJob], monkeypatch: pytest.MonkeyPatch, margin: int, kinds: int
) -> None:
    monkeypatch.setattr(drawing, "LOOK", margin)
    monkeypatch.setattr(drawing, "SORTED", kinds)
    offers = Offers()
    with pool.database.engine.connect() as connection:
        for seed in range(8):
            seen = sampled(connection, motley, offers, seed=seed)
            assert len(seen.groups) > snapshot.FEW
            for group, found in zip(seen.groups, seen.candidates, strict=True):
                want = group.wanted(5)
                able = {row.id for row in connection.execute(ABLE, vars(want))}
                ids = {bot.id for bot in found}
                assert ids <= able
                assert len(ids) == len(found) == min(want.count, len(able)), group


@pytest.mark.parametrize("margin", [drawing.LOOK, 5_000], ids=["rarely in the window", "always in the window"])
def test_the_only_bot_in_two_thousand_that_offers_something_is_found(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, margin: int
) -> None:
    monkeypatch.setattr(drawing, "LOOK", margin)
    kinds = tuple(f"common-{number}" for number in range(8))

    def fill(connection: Connection) -> None:
        filling.fill_queues(connection, instances=1, kinds=("rare", *kinds))
        filling.fill_jobs(connection, 9, instances=1, kinds=("rare", *kinds))
        filling.fill_bots(connection, {"rare": 1, **dict.fromkeys(kinds, 250)})

    pool.database.run(fill)
    rare = pool.row("SELECT id FROM platforms WHERE properties->'kind'->>0 = 'rare'").id
    offers = Offers()
    with pool.database.engine.connect() as connection:
        for seed in range(10):
            seen = sampled(connection, waiting(pool), offers, seed=seed)
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
        seen = sampled(connection, waiting(pool), Offers(), seed=1)
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
    jobs, offers = waiting(pool), Offers()
    with pool.database.engine.connect() as connection:
        for seed in range(3):
            seen = sampled(connection, jobs, offers, seed=seed)
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
            seen = sampled(connection, waiting(pool), Offers(), seed=seed)
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
    jobs, offers = six_kinds_of_jobs(pool), Offers()
    pool.bot("b", capacity=10, properties={"kind": list(LETTERS)})
    with pool.database.engine.connect() as connection:
        before = sampled(connection, jobs, offers, seed=1)
        assert [len(found) for found in before.candidates] == [1] * 6
        pool.bot("b", capacity=10, properties={"kind": ["a"]})
        placements = Capacity().choose(before, Policy(), how={})
        granted = moves.grant(connection, placements, assigner="test", strategy="test", ack=1)
        assert [lease.job_id for lease in granted] == [jobs[0].id]
        connection.rollback()
        after = sampled(connection, jobs, offers, seed=1)
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
    jobs, offers, statements = waiting(pool), Offers(), list[str]()
    event.listen(
        pool.database.engine, "before_cursor_execute", lambda _c, _k, statement, *_: statements.append(statement)
    )
    counts = []
    with pool.database.engine.connect() as connection:
        for seed in range(3):
            statements.clear()
            seen = sampled(connection, jobs, offers, seed=seed)
            assert [len(found) for found in seen.candidates] == [5] * 300
            counts.append(len(statements))
    assert counts == [3, 2, 2]


def test_what_is_known_of_a_kind_holds_for_bots_that_come_later(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, offers = six_kinds_of_jobs(pool), Offers()
    pool.bot("early", properties={"kind": ["a", "b"]})
    with pool.database.engine.connect() as connection:
        sampled(connection, jobs, offers, seed=1)
        pool.bot("late", properties={"kind": ["b", "a"]})
        monkeypatch.setattr(windows, "offered", None)
        assert [len(found) for found in sampled(connection, jobs, offers, seed=1).candidates] == [2, 2, 0, 0, 0, 0]


def test_the_memory_of_an_assigner_is_bounded() -> None:
    offers = Offers(limit=10)
    for kind in range(25):
        offers.learn([(1, kind, True), (2, kind, False)])
        assert len(offers.of(1)) + len(offers.of(2)) <= 10
        offers.fell_short((0, 0, kind, 1))
        assert offers.of(1)[kind]
        assert not offers.of(2)[kind]


def test_a_group_that_falls_short_again_and_again_is_left_out_ever_longer_but_never_for_good() -> None:
    offers, group = Offers(), (0, 1, 7, 1)
    pauses = []
    for _ in range(8):
        offers.fell_short(group)
        pauses.append(next(turn for turn in range(100) if not offers.passed_by(group)))
    assert pauses == [1, 2, 4, 8, 16, SKIPPED, SKIPPED, SKIPPED]
    offers.sufficed(group)
    assert not offers.passed_by(group)
