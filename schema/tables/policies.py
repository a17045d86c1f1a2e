"""Tables of policy versions: what decides who starts when, as it was at each change, which one is in force, trials of
versions on a part of the pool, and reports of simulations."""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from schema.tables.columns import NOW, TIME, identity, metadata

# A row never changes. `content`: all that decides, by name. `parent`: the version that was in force before. `changes`:
# the first differences from it, and `changed` their number. `drafted`: it was made without being put into force.
policies = Table(
    "policies",
    metadata,
    identity(Integer),
    Column("digest", LargeBinary, nullable=False),
    Column("made_at", TIME, nullable=False, server_default=NOW),
    Column("author", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("parent", Integer),
    Column("changed", Integer, nullable=False),
    Column("changes", JSONB, nullable=False),
    Column("content", JSONB, nullable=False),
    Column("drafted", Boolean, nullable=False, server_default=text("false")),
)

# One row. Who changes what decides locks it first, so that changes take turns. `id` is null before the first version.
# `origin` tells how the version `of` came into force: `before` it was another one, a rollback `undid` one, and what had
# to be `kept`. It counts only if `of` is the version in force: a process of the release before does not write it. Its
# `repricing` is where the walk through the waiting jobs is that follows a change of points: `after` which job the next
# batch begins, null = it is over, and how many jobs it has `changed`.
policy_in_force = Table(
    "policy_in_force",
    metadata,
    Column("one", Boolean, nullable=False, server_default=text("true")),
    Column("id", Integer),
    Column("since", TIME, nullable=False, server_default=NOW),
    Column("origin", JSONB),
    PrimaryKeyConstraint("one"),
    CheckConstraint("one", name="policy_in_force_is_one"),
)

# Digests of configuration files that have been put into force, and when that was last done.
policy_files = Table(
    "policy_files",
    metadata,
    Column("digest", LargeBinary, nullable=False),
    Column("at", TIME, nullable=False, server_default=NOW),
    PrimaryKeyConstraint("digest"),
)

# Trials of a version on some cohorts or instances, at most one at a time. A row with an end never changes. `names`: all
# that it may reach, in order; `steps`: how many of them each step has; `before`: of each step, what was measured before
# the trial. `tried` and `undo`: the limits of these names as the version has them, and as they were. `measured`: what
# was found by the last look. `outcome` and `why` tell how it ended.
policy_canaries = Table(
    "policy_canaries",
    metadata,
    identity(Integer),
    Column("policy", Integer, nullable=False),
    Column("base", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("names", JSONB, nullable=False),
    Column("steps", JSONB, nullable=False),
    Column("step", Integer, nullable=False, server_default=text("0")),
    Column("every", Double, nullable=False),
    Column("guards", JSONB, nullable=False),
    Column("least", Integer, nullable=False),
    Column("author", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("before", JSONB, nullable=False),
    Column("tried", JSONB, nullable=False),
    Column("undo", JSONB, nullable=False),
    Column("untried", JSONB, nullable=False),
    Column("measured", JSONB),
    Column("begun_at", TIME, nullable=False, server_default=NOW),
    Column("step_at", TIME, nullable=False, server_default=NOW),
    Column("looked_at", TIME),
    Column("ended_at", TIME),
    Column("outcome", Text),
    Column("why", Text),
    CheckConstraint("kind IN ('cohort', 'instance')", name="policy_canaries_kind_known"),
    CheckConstraint("step >= 0", name="policy_canaries_step_positive"),
    CheckConstraint("every > 0 AND least >= 1", name="policy_canaries_sound"),
    CheckConstraint("(ended_at IS NULL) = (outcome IS NULL)", name="policy_canaries_ended_iff_outcome"),
    CheckConstraint(
        "outcome IN ('activated', 'returned', 'stopped', 'replaced')", name="policy_canaries_outcome_known"
    ),
    Index("policy_canaries_one", text("(ended_at IS NULL)"), unique=True, postgresql_where=text("ended_at IS NULL")),
)

# Reports of `leasehold simulate` that somebody has kept, as JSON. A row never changes.
simulations = Table(
    "simulations",
    metadata,
    identity(Integer),
    Column("made_at", TIME, nullable=False, server_default=NOW),
    Column("title", Text, nullable=False),
    Column("report", JSONB, nullable=False),
)
