"""The tables of the fleet: bots, what they offer and remember, and their leases."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Computed,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from schema.sql import LIVE, NOT_OVER
from schema.tables.columns import NO_LABELS, NOW, TIME, identity, metadata, name_form

# Kinds of bots: bots of one kind offer the same properties, and of these the same ones exclusively. A bot with
# exclusive properties runs only jobs that ask for each of them.
kinds = Table(
    "kinds",
    metadata,
    identity(Integer),
    Column("digest", LargeBinary, nullable=False),
    Column("properties", JSONB, nullable=False),
    Column("exclusive", ARRAY(Text), nullable=False, server_default=NO_LABELS),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    UniqueConstraint("digest", name="kinds_digest_key"),
    CheckConstraint("properties ?& exclusive", name="kinds_exclusive_offered"),
)

# Which kinds of bots offer what which requirement set asks for, and are open to it: the set names each property that
# the kind offers exclusively. A row never changes: it is made with the kind or with
# the set, whichever comes last, and goes with whichever goes first. Where both appear at once, upkeep adds the row.
kind_platforms = Table(
    "kind_platforms",
    metadata,
    Column("platform", Integer, nullable=False),
    Column("kind", Integer, nullable=False),
    PrimaryKeyConstraint("platform", "kind"),
    Index("kind_platforms_of_kind", "kind"),
)

bots = Table(
    "bots",
    metadata,
    identity(),
    Column("name", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("session", LargeBinary),
    Column("sync_seq", BigInteger, nullable=False, server_default=text("0")),
    Column("status", Text, nullable=False, server_default="gone"),
    Column("draining", Boolean, nullable=False, server_default=text("false")),
    Column("closing", Boolean, nullable=False, server_default=text("false")),
    Column("instance", Integer),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("capacity", Integer, nullable=False, server_default=text("0")),
    Column("in_use", Integer, nullable=False, server_default=text("0")),
    Column("opened_at", TIME),
    Column("expires_at", TIME),
    Column("labels", ARRAY(Text), nullable=False, server_default=NO_LABELS),
    Column("cohort", Integer, nullable=False, server_default=text("0")),
    Column("pool", Text),
    # Units that an eviction frees, or has freed, for one instance: no other instance gets them.
    Column("kept_units", Integer, nullable=False, server_default=text("0")),
    Column("kept_for", Integer),
    Column("kept_until", TIME),
    Column("drain_deadline", TIME),
    Column("held", Integer, nullable=False, server_default=text("0")),
    Column("kind", Integer),
    Column("probation_until", TIME),
    # The agent's machine, its process id there and the version of its software, as the agent of the latest session has
    # told them. Only people read them.
    Column("host", Text),
    Column("pid", Integer),
    Column("version", Text),
    # Seconds that the agent gives a job between SIGTERM and SIGKILL.
    Column("kill_grace", Double, nullable=False, server_default=text("2")),
    Column(
        "free",
        Boolean,
        Computed(
            "status = 'ok' AND NOT draining AND NOT closing AND sync_seq > 0 AND in_use < capacity"
            " AND (probation_until IS NULL OR in_use = 0)",
            persisted=True,
        ),
    ),
    UniqueConstraint("name", name="bots_name_key"),
    CheckConstraint(name_form(), name="bots_name_form"),
    CheckConstraint("status IN ('ok', 'unhealthy', 'draining', 'gone')", name="bots_status_known"),
    CheckConstraint("0 <= in_use AND in_use <= capacity", name="bots_capacity_kept"),
    CheckConstraint("(session IS NULL) = (status = 'gone')", name="bots_session_iff_present"),
    CheckConstraint("(expires_at IS NULL) = (session IS NULL)", name="bots_expiry_with_session"),
    CheckConstraint("priority BETWEEN -1000 AND 1000", name="bots_priority_range"),
    CheckConstraint("status = 'gone' OR kind IS NOT NULL", name="bots_kind_while_present"),
    Index("bots_present", "id", postgresql_where=text("status <> 'gone'")),
    CheckConstraint(name_form("pool"), name="bots_pool_form"),
    CheckConstraint("instance IS NULL OR pool IS NULL", name="bots_serve_instance_or_pool"),
    CheckConstraint("kept_units >= 0", name="bots_kept_positive"),
    CheckConstraint("kept_units = 0 OR kept_for IS NOT NULL AND kept_until IS NOT NULL", name="bots_kept_for_somebody"),
    CheckConstraint("held >= 0", name="bots_held_positive"),
    CheckConstraint("pid > 0", name="bots_pid_positive"),
    CheckConstraint("length(version) BETWEEN 1 AND 64", name="bots_version_length"),
    CheckConstraint("kill_grace >= 0 AND kill_grace <= 600", name="bots_kill_grace_range"),
    Index("bots_kept", "kept_for", postgresql_where=text("kept_units > 0")),
    Index("bots_probation", "id", postgresql_where=text("probation_until IS NOT NULL")),
    Index("bots_free", "cohort", "kind", "instance", "pool", postgresql_where=text("free")),
    Index("bots_of_cohort", "cohort", "kind", "instance", "pool", postgresql_where=text("status <> 'gone'")),
    Index("bots_drain_deadline", "drain_deadline", postgresql_where=text("draining AND drain_deadline IS NOT NULL")),
)

# Attempts that the expiry of a session has charged to their jobs, with the digest of that session's secret. A bot that
# was only cut off gives it when it comes back, and the charge is taken back.
lost_attempts = Table(
    "lost_attempts",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("bot_id", BigInteger, nullable=False),
    Column("session", LargeBinary, nullable=False),
    Column("at", TIME, nullable=False, server_default=NOW),
    PrimaryKeyConstraint("job_id", "fence"),
    Index("lost_attempts_of_bot", "bot_id"),
    Index("lost_attempts_old", "at"),
)

# The latest transaction that changed what assigners remember of a bot (`mark_bot_change`). It is no column of `bots`:
# its index would get an entry with nearly every change of what is in use of a bot.
bot_changes = Table(
    "bot_changes",
    metadata,
    Column("bot_id", BigInteger, primary_key=True, autoincrement=False),
    Column("transaction", BigInteger, nullable=False),
    Index("bot_changes_by_transaction", "transaction"),
)

bot_localities = Table(
    "bot_localities",
    metadata,
    Column("bot_id", BigInteger, nullable=False),
    Column("hint", Text, nullable=False),
    Column("seq", BigInteger, Identity(), nullable=False),
    PrimaryKeyConstraint("bot_id", "hint"),
    Index("bot_localities_of_hint", "hint", "seq"),
)

# A lease also has what the view `job_events` tells of its grant, its acknowledgement and its end: the number of each
# event, who did it and what was noted. Without a number, the event is a stored one. What never changes comes first, and
# what moves change comes last: of a new version of the row, the server logs what is between the first and last change.
leases = Table(
    "leases",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("bot_id", BigInteger, nullable=False),
    Column("bot_epoch", BigInteger, nullable=False),
    Column("granted_at", TIME, nullable=False, server_default=NOW),
    Column("granted_event", BigInteger),
    Column("instance", Integer, nullable=False),
    Column("cohort", Integer, nullable=False, server_default=text("0")),
    Column("units", Integer, nullable=False),
    Column("assigner", Text, nullable=False),
    Column("strategy", Text, nullable=False),
    Column("decision", JSONB),
    # The amounts of counters that the lease takes, by counter name; null for a job without constraints.
    Column("taken", JSONB),
    # The version of the policy by which the assigner, or the gateway, worked.
    Column("policy", Integer),
    Column("delivered_at", TIME),
    Column("state", Text, nullable=False, server_default="pending"),
    Column("stop_reason", Text),
    Column("acknowledged_at", TIME),
    Column("acknowledged_event", BigInteger),
    Column("acknowledged_by", Text),
    Column("due_at", TIME),
    Column("ended_at", TIME),
    Column("ended_event", BigInteger),
    Column("ended_by", Text),
    Column("ended_from", Text),
    Column("ended_to", Text),
    Column("verdict", Text),
    Column("report", JSONB),
    PrimaryKeyConstraint("job_id", "fence"),
    CheckConstraint(
        "state IN ('pending', 'active', 'cancelling', 'completed', 'cancelled')", name="leases_state_known"
    ),
    CheckConstraint("(ended_at IS NOT NULL) = (state IN ('completed', 'cancelled'))", name="leases_ended_iff_over"),
    CheckConstraint(
        "stop_reason IN ('cancel', 'unacknowledged', 'timeout', 'ceiling', 'preempt', 'drain')",
        name="leases_stop_reason_known",
    ),
    CheckConstraint("units >= 1", name="leases_units_positive"),
    Index("leases_one_live_per_job", "job_id", unique=True, postgresql_where=text(LIVE)),
    Index("leases_live_of_bot", "bot_id", "granted_at", postgresql_where=text(NOT_OVER)),
    Index("leases_live_due", "due_at", postgresql_where=text(f"{LIVE} AND due_at IS NOT NULL")),
    Index(
        "leases_stopping",
        "cohort",
        "instance",
        postgresql_include=["units"],
        postgresql_where=text("state = 'cancelling'"),
    ),
)
