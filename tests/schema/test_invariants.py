"""Each invariant finds the database in which it is broken, and nothing in a sound one."""

import pytest

from schema.diagnostics import invariants
from schema.postgres.connection import Connection
from schema.postgres.engine import Database
from schema.postgres.statements import Statement

# One bot with three units in use, one with a unit kept for an instance, quotas, and a job in each state a history can
# end in: 1 queued again, 2 leased, 3 running, 4 cancelling, 5 succeeded, 6 cancelled while queued,
# 7 dead after three kills, 8 blocked. All but 4 are nodes of a graph: 8 waits for 3 and for what is absent, 2 ran after
# 5, 3 runs although 7 is dead, and 6 never could.
SOUND = """
INSERT INTO instances (id, name) VALUES (1, 'default'), (2, 'other');
INSERT INTO platforms (id, digest, properties, linked) VALUES
    (1, 'a', '{}', true), (2, 'b', '{"os": ["linux"]}', true), (3, 'c', '{"os": ["windows"]}', false);
INSERT INTO kinds (id, digest, properties) VALUES (1, 'a', '{"os": ["bsd", "linux"]}'), (2, 'b', '{}');
INSERT INTO kind_platforms (platform, kind) VALUES (1, 1), (2, 1), (1, 2);
INSERT INTO bots (id, name, epoch, session, sync_seq, status, capacity, in_use, held, kind, instance, opened_at,
                  expires_at)
VALUES (1, 'busy', 2, 's', 1, 'ok', 4, 3, 3, 1, 1, now(), now()),
       (2, 'free', 1, 's', 1, 'ok', 1, 0, 0, 2, NULL, now(), now()),
       (3, 'gone', 1, NULL, 0, 'gone', 0, 0, 0, NULL, NULL, NULL, NULL);
INSERT INTO queues (id, cohort, instance, platform, units) VALUES (1, 0, 1, 1, 1), (2, 0, 1, 2, 1), (3, 0, 1, 3, 1);
INSERT INTO constraint_sets (id, digest, terms) VALUES (1, 'a', '{}');
INSERT INTO schedules (id, instance, name, cron, zone, catch_up, catch_up_most, catch_up_seconds, overlap, request,
                       enabled, next_tick, due_at, set_by)
OVERRIDING SYSTEM VALUE VALUES (1, 1, 's', '0 3 * * *', 'UTC', 'skip', 1, 1, 'skip', '{}', true, now(), now(), 'x');
INSERT INTO queues (id, cohort, instance, platform, units, constraint_set) VALUES (4, 0, 1, 1, 1, 1);
INSERT INTO queues (id, cohort, instance, platform, units, preferred, required) VALUES (5, 0, 1, 2, 1, 2, 1);
INSERT INTO jobs (id, queue, instance, platform, state, fence, result_fence, attempts, kills, finished_at) VALUES
    (1, 1, 1, 1, 'queued', 2, NULL, 1, 1, NULL),
    (2, 2, 1, 2, 'leased', 1, NULL, 1, 0, NULL),
    (3, 1, 1, 1, 'running', 1, NULL, 1, 0, NULL),
    (4, 1, 1, 1, 'cancelling', 1, NULL, 1, 0, NULL),
    (5, 1, 1, 1, 'succeeded', 1, 1, 1, 0, now()),
    (6, 1, 1, 1, 'cancelled', 0, NULL, 0, 0, now()),
    (7, 1, 1, 1, 'dead', 6, NULL, 3, 3, now()),
    (8, 1, 1, 1, 'blocked', 0, NULL, 0, 0, NULL);
INSERT INTO job_payloads (job_id, payload) SELECT id, '{}' FROM jobs;
INSERT INTO job_results (job_id, fence, result) VALUES (5, 1, '{}');
INSERT INTO job_checkpoints (job_id, fence, number, checkpoint) VALUES (1, 1, 1, '{}'), (3, 1, 1, '{}');
INSERT INTO leases (job_id, fence, bot_id, bot_epoch, instance, state, units, assigner, strategy, ended_at) VALUES
    (1, 1, 1, 1, 1, 'cancelled', 1, 'a', 's', now()),
    (2, 1, 1, 2, 1, 'pending', 1, 'a', 's', NULL),
    (3, 1, 1, 2, 1, 'active', 1, 'a', 's', NULL),
    (4, 1, 1, 2, 1, 'cancelling', 1, 'a', 's', NULL),
    (5, 1, 1, 2, 1, 'completed', 1, 'a', 's', now());
INSERT INTO quotas (cohort, instance, max_quota, usage) VALUES (0, 1, 10, 3), (0, 2, 10, 0);
UPDATE bots SET kept_units = 1, kept_for = 1, kept_until = now() WHERE id = 2;
INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor) VALUES
    (1, 'submit', NULL, 'queued', 0, 'x'), (1, 'grant', 'queued', 'leased', 1, 'x'),
    (1, 'expire', 'leased', 'queued', 2, 'x'),
    (2, 'submit', NULL, 'queued', 0, 'x'), (2, 'grant', 'queued', 'leased', 1, 'x'),
    (3, 'submit', NULL, 'queued', 0, 'x'), (3, 'grant', 'queued', 'leased', 1, 'x'),
    (3, 'acknowledge', 'leased', 'running', 1, 'x'),
    (4, 'submit', NULL, 'queued', 0, 'x'), (4, 'grant', 'queued', 'leased', 1, 'x'),
    (4, 'ask_stop', 'leased', 'cancelling', 1, 'x'),
    (5, 'submit', NULL, 'queued', 0, 'x'), (5, 'grant', 'queued', 'leased', 1, 'x'),
    (5, 'finish', 'leased', 'succeeded', 1, 'x'),
    (6, 'submit', NULL, 'queued', 0, 'x'), (6, 'cancel', 'queued', 'cancelled', 0, 'x'),
    (7, 'submit', NULL, 'queued', 0, 'x'), (7, 'expire', 'queued', 'dead', 6, 'x'),
    (8, 'submit', NULL, 'blocked', 0, 'x');
INSERT INTO graphs (id, instance, name, nodes, edges, ready, missing, actor) VALUES (1, 1, 'g', 7, 4, 3, '{99}', 'x');
INSERT INTO graph_nodes (job_id, graph, node_no, depth, pending_deps, dead_ends, missing, outcome) VALUES
    (1, 1, 1, 0, 0, 0, '{}', NULL), (2, 1, 2, 1, 0, 0, '{}', NULL), (3, 1, 3, 1, 0, 0, '{}', NULL),
    (5, 1, 5, 0, 0, 0, '{}', 'succeeded'), (6, 1, 6, 1, 1, 1, '{}', 'cancelled'), (7, 1, 7, 0, 0, 0, '{}', 'dead'),
    (8, 1, 8, 2, 2, 1, '{99}', NULL);
INSERT INTO graph_edges VALUES (5, 2, 'block'), (7, 3, 'run'), (7, 6, 'block'), (3, 8, 'block');
"""

# What broke, the statements that break it, and the ids that must be shown for it.
BROKEN = [
    ("S1", "DROP INDEX leases_one_live_per_job; UPDATE leases SET state = 'active', ended_at = NULL WHERE job_id = 1;"
           "INSERT INTO leases (job_id, fence, bot_id, bot_epoch, instance, state, units, assigner, strategy)"
           " SELECT job_id, 2, bot_id, bot_epoch, instance, state, units, assigner, strategy"
           " FROM leases WHERE job_id = 1", ["1"]),
    ("S2", "UPDATE leases SET state = 'completed', ended_at = now() WHERE job_id = 3", ["3"]),
    ("S2", "UPDATE jobs SET state = 'queued' WHERE id = 2", ["2"]),
    ("S2", "UPDATE jobs SET fence = 2 WHERE id = 4", ["4"]),
    ("S2", "UPDATE leases SET state = 'active', ended_at = NULL WHERE job_id = 1", ["1"]),
    ("S2", "DELETE FROM jobs WHERE id = 3", ["3"]),
    ("S2", "UPDATE leases SET state = 'active' WHERE job_id = 2", ["2"]),
    ("S2", "UPDATE leases SET state = 'pending' WHERE job_id = 3", ["3"]),
    ("S2", "UPDATE leases SET state = 'active' WHERE job_id = 4", ["4"]),
    ("S3", "UPDATE bots SET in_use = 2 WHERE id = 1", ["1"]),
    ("S3", "UPDATE bots SET in_use = 1 WHERE id = 2", ["2"]),
    ("S3", "UPDATE bots SET held = 2 WHERE id = 1", ["1"]),
    ("S3", "UPDATE bots SET held = 1 WHERE id = 2", ["2"]),
    ("S3", "ALTER TABLE bots DROP CONSTRAINT bots_capacity_kept; UPDATE bots SET capacity = 2 WHERE id = 1", ["1"]),
    ("S3", "UPDATE bots SET kept_units = 1, kept_for = 1, kept_until = now() WHERE id = 3", ["3"]),
    ("S4", "UPDATE quotas SET usage = 2 WHERE instance = 1", ["0/1"]),
    ("S4", "UPDATE quotas SET usage = 1 WHERE instance = 2", ["0/2"]),
    ("S4", "UPDATE leases SET units = 2 WHERE job_id = 3", ["0/1"]),
    ("S6", "ALTER TABLE jobs DROP CONSTRAINT jobs_sound; SET session_replication_role = replica;"
           "UPDATE jobs SET result_fence = 0 WHERE id = 5", ["5"]),
    ("S6", "UPDATE jobs SET result_fence = fence WHERE id = 3", ["3"]),
    ("S6", "SET session_replication_role = replica; UPDATE jobs SET result_fence = NULL WHERE id = 5", ["5"]),
    ("S6", "SET session_replication_role = replica; UPDATE jobs SET result_fence = fence WHERE id = 7", ["7"]),
    ("S7", "SET session_replication_role = replica;"
           "UPDATE jobs SET state = 'queued', finished_at = NULL, result_fence = NULL WHERE id = 5;"
           "INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)"
           " VALUES (5, 'requeue', 'succeeded', 'queued', 1, 'x')", ["5"]),
    ("S8", "UPDATE stored_events SET fence = 9 WHERE job_id = 3 AND move = 'grant'", ["3"]),
    ("S8", "UPDATE jobs SET fence = 1 WHERE id = 1", ["1"]),
    ("S8", "UPDATE leases SET fence = 5 WHERE job_id = 1", ["1"]),
    ("S9", "UPDATE bots SET epoch = 3 WHERE id = 1", ["2", "3", "4"]),
    ("S9", "UPDATE bots SET session = NULL, status = 'gone', expires_at = NULL WHERE id = 1", ["2", "3", "4"]),
    ("S9", "DELETE FROM bots WHERE id = 1", ["2", "3", "4"]),
    ("S10", "UPDATE stored_events SET to_state = 'queued' WHERE job_id = 3 AND move = 'acknowledge'", ["3"]),
    ("S10", "DELETE FROM stored_events WHERE job_id = 6", ["6"]),
    ("S10", "DELETE FROM jobs WHERE id = 6; DELETE FROM job_payloads WHERE job_id = 6", ["6"]),
    ("S10", "INSERT INTO job_payloads (job_id, payload) VALUES (99, '{}')", ["99"]),
    ("S10", "INSERT INTO job_results (job_id, fence, result) VALUES (99, 1, '1')", ["99"]),
    ("S10", "INSERT INTO job_followers (job_id, actor, priority) VALUES (99, 'x', 0)", ["99"]),
    ("S10", "INSERT INTO job_metadata (job_id, instance, key, value) VALUES (99, 1, 'k', 'v')", ["99"]),
    ("S10", "INSERT INTO preference_waits (job_id, seconds, until) VALUES (99, 1, now())", ["99"]),
    ("S11", "DELETE FROM stored_events WHERE job_id = 3 AND move = 'grant'", ["3"]),
    ("S11", "DELETE FROM stored_events WHERE job_id = 3 AND move = 'submit'", ["3"]),
    ("S13", "UPDATE jobs SET platform = 3 WHERE id = 2", ["2"]),
    ("S13", "UPDATE jobs SET platform = 77 WHERE id = 3", ["3"]),
    ("S13", "UPDATE bots SET kind = 2 WHERE id = 1", ["2"]),
    ("S13", "UPDATE bots SET instance = 2 WHERE id = 1", ["2", "3", "4"]),
    ("S14", "UPDATE graph_nodes SET pending_deps = 3 WHERE job_id = 8", ["8"]),
    ("S14", "UPDATE graph_nodes SET dead_ends = 0 WHERE job_id = 6", ["6"]),
    ("S14", "UPDATE graph_nodes SET pending_deps = 1 WHERE job_id = 2; INSERT INTO graph_edges VALUES (3, 2, 'run')",
     ["2"]),
    ("S14", "UPDATE jobs SET state = 'queued' WHERE id = 8", ["8"]),
    ("S14", "UPDATE jobs SET attempts = 1 WHERE id = 6", ["6"]),
    ("S14", "DELETE FROM graph_edges WHERE child = 8; DELETE FROM graph_nodes WHERE job_id = 8", ["8"]),
    ("S14", "DELETE FROM graph_edges WHERE child = 8;"
            "UPDATE graph_nodes SET pending_deps = 0, dead_ends = 0, missing = '{}' WHERE job_id = 8", ["8"]),
    ("S14", "UPDATE graph_nodes SET outcome = 'failed' WHERE job_id = 5", ["2", "5"]),
    ("S14", "UPDATE graph_nodes SET outcome = NULL WHERE job_id = 5", ["2", "5"]),
    ("S14", "UPDATE graph_nodes SET outcome = 'dead' WHERE job_id = 1", ["1"]),
    ("S14", "UPDATE graph_nodes SET graph = 2 WHERE job_id = 5", ["2"]),
    ("S14", "INSERT INTO graph_edges VALUES (7, 99, 'run')", ["99"]),
    ("S16", "ALTER TABLE jobs DROP CONSTRAINT jobs_sound; UPDATE jobs SET attempts = 6 WHERE id = 1", ["1"]),
    ("S16", "UPDATE jobs SET kills = 3 WHERE id = 3", ["3"]),
    ("S26", "INSERT INTO lost_attempts (job_id, fence, bot_id, session) SELECT id, fence, 1, '' FROM jobs WHERE id = 3",
     ["3"]),
    ("S26", """INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor, details)
               SELECT 3, 'forgive', state, state, fence, 'x', '{"lost_fence": 1}' FROM jobs, generate_series(1, 2)
               WHERE id = 3""", ["3"]),
    ("S18", "UPDATE jobs SET queue = 4, constrained = true WHERE id = 3", ["3"]),
    ("S18", "UPDATE leases SET taken = '{}' WHERE job_id = 3", ["3"]),
    ("S19", "INSERT INTO counters (name, used) VALUES ('lock:x', 1)", ["lock:x"]),
    ("S21", "UPDATE jobs SET queue = 77 WHERE id = 1", ["1"]),
    ("S21", "UPDATE jobs SET queue = 2 WHERE id = 1", ["1"]),
    ("S21", "UPDATE jobs SET units = 2 WHERE id = 6", ["6"]),
    ("S21", "UPDATE jobs SET cohort = 1 WHERE id = 7", ["7"]),
    ("S21", "UPDATE jobs SET queue = 4 WHERE id = 1", ["1"]),
    ("S21", "UPDATE jobs SET priority = 5 WHERE id = 1", ["1"]),
    ("S22", "UPDATE bots SET kind = 7 WHERE id = 2", ["bot 2"]),
    ("S22", "DELETE FROM kind_platforms WHERE platform = 1 AND kind = 2", ["1 2"]),
    ("S22", "INSERT INTO kind_platforms (platform, kind) VALUES (3, 2)", ["3 2"]),
    ("S22", "DELETE FROM kinds WHERE id = 2", ["1 2", "bot 2"]),
    ("S21", "UPDATE jobs SET preferred = 2 WHERE id = 1", ["1"]),
    ("S24", "UPDATE jobs SET queue = 5, platform = 2, preferred = 2 WHERE id = 2", ["2"]),
    ("S25", "INSERT INTO ceilings (max_timeout) VALUES (5); DELETE FROM submit_checks", ["ceilings"]),
    ("S25", "INSERT INTO submit_checks VALUES ('queue_limits')", ["queue_limits"]),
    ("S27", "INSERT INTO job_results (job_id, fence, result) VALUES (3, 1, '1')", ["3"]),
    ("S27", "UPDATE job_results SET fence = 2 WHERE job_id = 5", ["5"]),
    ("S27", "INSERT INTO job_results (job_id, fence, result) VALUES (6, 0, '1')", ["6"]),
    ("S27", "UPDATE job_checkpoints SET fence = 2 WHERE job_id = 3", ["3"]),
    ("S28", """ALTER TABLE schedules DROP CONSTRAINT schedules_next_tick_if_enabled;
               UPDATE schedules SET next_tick = NULL, due_at = NULL""", ["schedule 1"]),
    ("S28", """ALTER TABLE schedules DROP CONSTRAINT schedules_declared_by_known;
               UPDATE schedules SET declared_by = 'shop'""", ["schedule 1"]),
    ("S28", """INSERT INTO job_metadata (job_id, instance, key, value) SELECT id, 1, 'tick', 't' FROM jobs WHERE id < 3;
               UPDATE stored_events SET actor = 'schedule:s' WHERE move = 'submit'""", ["job 2"]),
    ("S29", """INSERT INTO pool_samples (at, scope, span)
               VALUES ('2026-01-01T00:00Z', 'pool', 600), ('2026-01-01T00:09Z', 'pool', 60)""", ["pool/"]),
    ("S30", """SELECT keep_journal_days(86400);
               INSERT INTO journal (finished_at, job_id, fence, queued_at, queue, cohort, instance, units, priority,
                   is_last, withdrawn, state, label)
               SELECT coalesce(finished_at, now()), id, 0, queued_at, queue, 0, 1, 1, 0, id <> 3, false, 'dead', ''
               FROM jobs WHERE id IN (3, 5);
               INSERT INTO journal_queues (queue, instance, cohort, properties, used_at)
               SELECT id, '', '', '{}', now() FROM queues""", ["3", "5"]),
    ("S20", "INSERT INTO counters (name, used, most) VALUES ('bot:1:cpu_milli', 2, 1)", ["bot:1:cpu_milli"]),
    ("S20", """INSERT INTO counters (name, used, most) VALUES ('bot:2:cpu_milli', 1, 2);
               UPDATE jobs SET queue = 4, constrained = true WHERE id = 3;
               UPDATE leases SET taken = '{"bot:2:cpu_milli": 1}' WHERE job_id = 3""", ["3"]),
    ("S23", """INSERT INTO counters (name, used, most) VALUES ('bot:1:gpus', 1, 2), ('bot:1:gpu:0', 500, 1000);
               UPDATE constraint_sets SET terms = '{"resources": {"gpus": 1}}';
               UPDATE jobs SET queue = 4, constrained = true WHERE id = 3;
               UPDATE leases SET taken = '{"bot:1:gpus": 1, "bot:1:gpu:0": 500}' WHERE job_id = 3""", ["3"]),
]  # fmt: skip


#: Job 3 finishes, with all that belongs to it.
FINISH = """
UPDATE leases SET state = 'completed', ended_at = now() WHERE job_id = 3;
UPDATE bots SET in_use = 2, held = 2 WHERE id = 1;
UPDATE quotas SET usage = 2 WHERE instance = 1;
UPDATE jobs SET state = 'failed', result_fence = 1, finished_at = now() WHERE id = 3;
UPDATE graph_nodes SET outcome = 'failed' WHERE job_id = 3;
UPDATE graph_nodes SET dead_ends = 2 WHERE job_id = 8;
INSERT INTO stored_events (job_id, move, from_state, to_state, fence, actor)
VALUES (3, 'finish', 'running', 'failed', 1, 'x')"""


def execute(connection: Connection, script: str) -> None:
    for statement in filter(str.strip, script.split(";")):
        connection.execute_sql(statement)


def test_a_sound_database_has_no_findings_but_names_every_invariant(database: Database) -> None:
    database.run(lambda connection: execute(connection, SOUND))
    findings = invariants.verify(database)
    assert [finding.id for finding in findings] == [
        "S1", "S2", "S3", "S4", "S6", "S7", "S8", "S9", "S10", "S11", "S13", "S14", "S16", "S26", "S18", "S19", "S20",
        "S23", "S21", "S22", "S24", "S25", "S27", "S28", "S29", "S30",
    ]  # fmt: skip
    assert [(finding.rows, finding.sample) for finding in findings] == [(0, [])] * len(findings)
    assert all(finding.title for finding in findings)


@pytest.mark.breaks_invariants
def test_an_invariant_that_cannot_be_checked_is_told_and_keeps_no_other_one_from_being_checked(
    database: Database,
) -> None:
    database.run(lambda connection: execute(connection, SOUND))
    database.run(lambda c: execute(c, """UPDATE platforms SET properties = '"linux"'; UPDATE leases SET units = 2"""))
    found = {each.id: (each.rows, each.title[:20], each.sample) for each in invariants.verify(database) if each.rows}
    assert found["S13"] == (1, "could not be checked", ["cannot delete from scalar"])
    assert {"S3", "S4"} <= found.keys()


def test_a_database_that_breaks_an_invariant_is_found(database: Database) -> None:
    assert {invariant for invariant, *_ in BROKEN} == {invariant.id for invariant in invariants.INVARIANTS}
    database.run(lambda connection: execute(connection, SOUND))
    with database.connect() as connection:
        connection.execute(invariants.NO_JIT)
        for invariant, script, sample in BROKEN:
            with connection.savepoint() as undone:
                execute(connection, script)
                found = {finding.id: finding.sample for finding in invariants.check(connection) if finding.rows}
                undone.rollback()
            assert (script, found.get(invariant)) == (script, sample)


def test_a_finding_counts_all_rows_and_shows_the_first_five(database: Database) -> None:
    with database.connect() as connection:
        connection.execute_sql(
            "INSERT INTO job_payloads (job_id, payload) SELECT n, '{}' FROM generate_series(7, 18) n"
        )
        finding = next(finding for finding in invariants.check(connection) if finding.rows)
    assert (finding.id, finding.rows, finding.sample) == ("S10", 12, ["7", "8", "9", "10", "11"])


def test_all_invariants_see_one_snapshot_in_which_nothing_may_be_written(database: Database) -> None:
    """A move committed while the check runs is seen whole or not at all: here the check waits in its middle."""
    database.run(lambda connection: execute(connection, SOUND))
    with database.connect() as reader:
        reader.execute(invariants.SNAPSHOT)
        assert reader.execute(Statement("SHOW transaction_read_only")).scalar_one() == "on"
        assert reader.execute(Statement("SELECT count(*) FROM jobs")).scalar_one() == 8
        database.run(lambda connection: execute(connection, FINISH))
        assert not any(finding.rows for finding in invariants.check(reader))
