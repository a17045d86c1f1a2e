"""Tables of shadows: versions of the policy that decide beside the one in force, and what was counted of them."""

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, PrimaryKeyConstraint, Table, Text

from schema.tables.columns import NOW, TIME, identity, metadata

# A version that decides beside the one in force, of a `share` of the cycles, 0 to 1. `ended`: why it was ended before
# `ends_at`. At most one goes on: the newest.
policy_shadows = Table(
    "policy_shadows",
    metadata,
    identity(Integer),
    Column("policy", Integer, nullable=False),
    Column("share", Double, nullable=False),
    Column("author", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("began_at", TIME, nullable=False, server_default=NOW),
    Column("ends_at", TIME, nullable=False),
    Column("ended_at", TIME),
    Column("ended", Text),
)

# Sums of all processes: decisions that were compared, and those that the shadow made otherwise.
policy_shadow_counts = Table(
    "policy_shadow_counts",
    metadata,
    Column("shadow", Integer, ForeignKey("policy_shadows.id", ondelete="CASCADE"), nullable=False),
    Column("instance", Integer, nullable=False),
    *(
        Column(name, BigInteger, nullable=False)
        for name in ("bots", "other_bots", "orders", "other_orders", "victims", "other_victims")
    ),
    PrimaryKeyConstraint("shadow", "instance"),
)

# What the shadow of each process did: sampled cycles, seconds of processor time, and what it cannot compare.
policy_shadow_processes = Table(
    "policy_shadow_processes",
    metadata,
    Column("shadow", Integer, ForeignKey("policy_shadows.id", ondelete="CASCADE"), nullable=False),
    Column("process", Text, nullable=False),
    Column("at", TIME, nullable=False, server_default=NOW),
    *(Column(name, BigInteger, nullable=False) for name in ("compared", "skipped", "failed")),
    Column("seconds", Double, nullable=False),
    Column("reason", Text),
    PrimaryKeyConstraint("shadow", "process"),
)
