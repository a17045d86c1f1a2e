"""Tables of policy versions: what decides who starts when, as it was at each change, and which version is in force."""

from sqlalchemy import Boolean, CheckConstraint, Column, Integer, LargeBinary, PrimaryKeyConstraint, Table, Text, text
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
# to be `kept`. It counts only if `of` is the version in force: a process of the release before does not write it.
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
