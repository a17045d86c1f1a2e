"""Tables of tenancy and operation: instances, cohorts, quotas, schedules, tokens, drains, declarations, audit rows."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    Numeric,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, UUID

from schema.tables.columns import NO_LABELS, NOW, TIME, identity, metadata, name_form

instances = Table(
    "instances",
    metadata,
    identity(Integer),
    Column("name", Text, nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    Column("pool", Text),
    Column("draining", Boolean, nullable=False, server_default=text("false")),
    Column("drain_deadline", TIME),
    Column("managed", Boolean, nullable=False, server_default=text("false")),
    # The most that one attempt's report counts for, by unit; null without any.
    Column("report_ceilings", JSONB),
    UniqueConstraint("name", name="instances_name_key"),
    CheckConstraint(name_form(), name="instances_name_form"),
    CheckConstraint(name_form("pool"), name="instances_pool_form"),
    Index(
        "instances_drain_deadline", "drain_deadline", postgresql_where=text("draining AND drain_deadline IS NOT NULL")
    ),
)

# At most one row. Without it, submits, schedules and bots make an instance by naming it.
tenancy_policy = Table(
    "tenancy_policy",
    metadata,
    Column("one", Boolean, nullable=False, server_default=text("true")),
    Column("create_instances", Text, nullable=False),
    PrimaryKeyConstraint("one"),
    CheckConstraint("one", name="tenancy_policy_one_row"),
    CheckConstraint("create_instances IN ('on_submit', 'never')", name="tenancy_policy_create_instances_known"),
)

cohorts = Table(
    "cohorts",
    metadata,
    identity(Integer),
    Column("name", Text, nullable=False),
    Column("labels", ARRAY(Text), nullable=False, server_default=NO_LABELS),
    Column("position", Integer, nullable=False, server_default=text("0")),
    Column("reclaim_min", Text, nullable=False, server_default="lower_priority_only"),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    UniqueConstraint("name", name="cohorts_name_key"),
    CheckConstraint(name_form(), name="cohorts_name_form"),
    CheckConstraint("reclaim_min IN ('lower_priority_only', 'any')", name="cohorts_reclaim_min_known"),
)

quotas = Table(
    "quotas",
    metadata,
    Column("cohort", Integer, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("min_quota", Integer, nullable=False, server_default=text("0")),
    Column("max_quota", Integer),
    Column("usage", Integer, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("cohort", "instance"),
    CheckConstraint("min_quota >= 0", name="quotas_min_positive"),
    CheckConstraint("max_quota >= min_quota", name="quotas_min_below_max"),
    CheckConstraint("usage >= 0", name="quotas_usage_positive"),
)

evictions = Table(
    "evictions",
    metadata,
    identity(),
    Column("at", TIME, nullable=False, server_default=func.clock_timestamp()),
    Column("cohort", Integer, nullable=False),
    Column("instance", Integer, nullable=False),
    Column("job_id", BigInteger, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("bot_id", BigInteger, nullable=False),
    Column("preemptor", BigInteger, nullable=False),
    Column("preemptor_instance", Integer, nullable=False),
    Column("rule", Text, nullable=False),
    Column("details", JSONB, nullable=False),
    Index("evictions_of_instance", "cohort", "instance", "at"),
)

# The most jobs that may wait: with a label, of an instance, or, where both are null, of each instance without a limit
# of its own.
queue_limits = Table(
    "queue_limits",
    metadata,
    identity(Integer),
    Column("label", Text),
    Column("max_queued", Integer, nullable=False),
    Column("instance", Integer),
    UniqueConstraint("label", "instance", name="queue_limits_key", postgresql_nulls_not_distinct=True),
    CheckConstraint("label IS NULL OR instance IS NULL", name="queue_limits_of_one"),
    CheckConstraint("octet_length(label) BETWEEN 1 AND 64", name="queue_limits_label_bounded"),
    CheckConstraint("max_queued >= 0", name="queue_limits_max_positive"),
)

# Which of `queue_limits`, `ceilings` and `submit_rules` have rows (`note_submit_check`): a submit asks only this table.
submit_checks = Table(
    "submit_checks",
    metadata,
    Column("source", Text, nullable=False),
    PrimaryKeyConstraint("source"),
)

# Ceilings of run times and queue ages, in seconds. A null instance or label stands for all of them.
ceilings = Table(
    "ceilings",
    metadata,
    identity(Integer),
    Column("instance", Integer),
    Column("label", Text),
    Column("default_timeout", Double),
    Column("max_timeout", Double),
    Column("max_queue_age", Double),
    UniqueConstraint("instance", "label", name="ceilings_key", postgresql_nulls_not_distinct=True),
    CheckConstraint("octet_length(label) BETWEEN 1 AND 64", name="ceilings_label_bounded"),
    CheckConstraint("default_timeout > 0 AND default_timeout <= 31536000", name="ceilings_default_timeout_range"),
    CheckConstraint("max_timeout > 0 AND max_timeout <= 31536000", name="ceilings_max_timeout_range"),
    CheckConstraint("max_queue_age > 0 AND max_queue_age <= 31536000", name="ceilings_max_queue_age_range"),
    CheckConstraint("default_timeout <= max_timeout", name="ceilings_default_below_max"),
)

# What a submit refuses, or puts back in the order: of the whole pool where `instance` is null. A null list or threshold
# refuses nothing; a null penalty refuses the jobs of an owner above the threshold.
submit_rules = Table(
    "submit_rules",
    metadata,
    identity(Integer),
    Column("instance", Integer),
    Column("property_keys", ARRAY(Text)),
    Column("commands", ARRAY(Text)),
    Column("owner_cost", Numeric(30, 6)),
    Column("owner_penalty", Integer),
    UniqueConstraint("instance", name="submit_rules_key", postgresql_nulls_not_distinct=True),
    CheckConstraint("owner_cost >= 0 AND owner_cost <> 'NaN'", name="submit_rules_owner_cost_positive"),
    CheckConstraint("owner_penalty BETWEEN 1 AND 2000", name="submit_rules_owner_penalty_range"),
    CheckConstraint("owner_penalty IS NULL OR owner_cost IS NOT NULL", name="submit_rules_penalty_above_cost"),
)

# Names that configuration files declare, and that operators cannot change by command.
declarations = Table(
    "declarations",
    metadata,
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    PrimaryKeyConstraint("kind", "name"),
)

# Requests to webhooks that have not succeeded yet. `next_at`: the next try; while one is made, the end of its claim.
webhook_deliveries = Table(
    "webhook_deliveries",
    metadata,
    identity(),
    Column("public_id", UUID(as_uuid=True), nullable=False),
    Column("webhook", Text, nullable=False),
    Column("body", JSONB, nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    Column("expires_at", TIME, nullable=False),
    Column("next_at", TIME, nullable=False, server_default=NOW),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("last_error", Text),
    Index("webhook_deliveries_due", "webhook", "next_at", "id"),
    Index("webhook_deliveries_old", "expires_at"),
)

# Jobs that are submitted again and again. `request`: the job as it was given. `next_tick`: the tick that is submitted
# next, of which `due_at` is the next try. `last_tick`: the newest tick that was handled, and `last_job` the newest job.
# `priority_ceiling`: that of the token by which the request was set. `failures`: refusals since the last success.
# `declared_by`: the source that declares it, `config` or `app:NAME`; null = a command.
schedules = Table(
    "schedules",
    metadata,
    identity(),
    Column("instance", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("cron", Text, nullable=False),
    Column("zone", Text, nullable=False),
    Column("catch_up", Text, nullable=False),
    Column("catch_up_most", Integer, nullable=False),
    Column("catch_up_seconds", Double, nullable=False),
    Column("overlap", Text, nullable=False),
    Column("request", JSONB, nullable=False),
    Column("priority_ceiling", Integer),
    Column("enabled", Boolean, nullable=False),
    Column("next_tick", TIME),
    Column("due_at", TIME),
    Column("last_tick", TIME),
    Column("last_job", BigInteger),
    Column("failures", Integer, nullable=False, server_default=text("0")),
    Column("last_error", Text),
    Column("failed_at", TIME),
    Column("set_by", Text, nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    Column("declared_by", Text),
    Column("left_out", Integer, nullable=False, server_default=text("0")),
    Column("left_out_since", TIME),
    UniqueConstraint("instance", "name", name="schedules_key"),
    CheckConstraint(name_form(), name="schedules_name_form"),
    CheckConstraint("octet_length(cron) BETWEEN 9 AND 200", name="schedules_cron_bounded"),
    CheckConstraint("catch_up IN ('skip', 'all', 'none')", name="schedules_catch_up_known"),
    CheckConstraint("catch_up_most BETWEEN 1 AND 1000", name="schedules_catch_up_most_range"),
    CheckConstraint("catch_up_seconds BETWEEN 0 AND 31536000", name="schedules_catch_up_seconds_range"),
    CheckConstraint("overlap IN ('allow', 'skip')", name="schedules_overlap_known"),
    CheckConstraint("enabled = (next_tick IS NOT NULL)", name="schedules_next_tick_if_enabled"),
    CheckConstraint(
        "(due_at IS NULL) = (next_tick IS NULL) AND due_at >= next_tick", name="schedules_due_after_next_tick"
    ),
    CheckConstraint("next_tick > last_tick", name="schedules_ticks_go_on"),
    CheckConstraint("failures = 0 OR failures > 0 AND last_error IS NOT NULL", name="schedules_failures_told"),
    CheckConstraint("declared_by = 'config' OR declared_by LIKE 'app:_%'", name="schedules_declared_by_known"),
    Index("schedules_due", "due_at", "id", postgresql_where=text("due_at IS NOT NULL")),
    CheckConstraint(
        "left_out >= 0 AND (left_out > 0) = (left_out_since IS NOT NULL)", name="schedules_left_out_since_told"
    ),
    Index("schedules_failing", "failures", postgresql_where=text("failures >= 3")),
    Index("schedules_left_out", "left_out", postgresql_where=text("left_out >= 3")),
)

# `settings`, `config_file`, `config_error`: what a process says of its configuration, in force since `settings_at`. A
# changed file that was refused is an error; the settings before it stay. `policy`: the version that it works by.
# `policy_file`: the digest of what decides in its file.
REPORTED = (
    ("config_file", Text),
    ("config_error", Text),
    ("settings", JSONB),
    ("settings_at", TIME),
    ("policy", Integer),
    ("policy_file", LargeBinary),
)

assigners = Table(
    "assigners",
    metadata,
    Column("name", Text, nullable=False),
    Column("draining", Boolean, nullable=False, server_default=text("false")),
    Column("drained_at", TIME),
    Column("started_at", TIME, nullable=False, server_default=NOW),
    Column("seen_at", TIME, nullable=False, server_default=NOW),
    Column("stopped_at", TIME),
    Column("serves", JSONB, nullable=False, server_default="[{}]"),
    *(Column(name, kind) for name, kind in REPORTED),
    PrimaryKeyConstraint("name"),
)

# Gateway processes. `figures`: what each says of itself with every sign of life, such as the length of its queue.
gateways = Table(
    "gateways",
    metadata,
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("started_at", TIME, nullable=False, server_default=NOW),
    Column("seen_at", TIME, nullable=False, server_default=NOW),
    Column("stopped_at", TIME),
    Column("figures", JSONB, nullable=False, server_default="{}"),
    *(Column(name, kind) for name, kind in REPORTED),
    PrimaryKeyConstraint("name"),
)

# A few choices of each assigner process, with all that the strategy saw, so that they can be made again with other
# weights. `policy`: the settings by which it chose. `seen`: the job and its candidates.
decision_samples = Table(
    "decision_samples",
    metadata,
    identity(),
    Column("at", TIME, nullable=False, server_default=NOW),
    Column("assigner", Text, nullable=False),
    Column("job", UUID(as_uuid=True), nullable=False),
    Column("bot", Text, nullable=False),
    Column("policy", JSONB, nullable=False),
    Column("seen", JSONB, nullable=False),
    Index("decision_samples_of_assigner", "assigner", "id"),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("instance", Text),
    Column("bot", Text),
    Column("priority_ceiling", Integer),
    Column("properties", JSONB),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    Column("expires_at", TIME),
    Column("revoked_at", TIME),
    Column("labels", ARRAY(Text)),
    Column("pool", Text),
    Column("note", Text),
    PrimaryKeyConstraint("id"),
    CheckConstraint("kind IN ('submitter', 'bot', 'operator')", name="tokens_kind_known"),
)

ticks = Table(
    "ticks",
    metadata,
    Column("name", Text, nullable=False),
    Column("at", TIME, nullable=False),
    Column("grace_until", TIME, nullable=False),
    PrimaryKeyConstraint("name"),
)

# What starts no further jobs: jobs with a label, calls of a task, an instance (which is drained), a schedule (which is
# disabled). `instance`: of a label or a task only the jobs of that instance, '' = all; of a schedule its own.
pauses = Table(
    "pauses",
    metadata,
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("instance", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("at", TIME, nullable=False, server_default=NOW),
    PrimaryKeyConstraint("kind", "name", "instance"),
    CheckConstraint("kind IN ('label', 'task', 'instance', 'schedule')", name="pauses_kind_known"),
)

# Gateways insert a row here and undo that, to learn whether the server takes writes. It is always empty.
write_probes = Table(
    "write_probes",
    metadata,
    Column("at", TIME, server_default=NOW),
)

# The server in which this database lives, one row. A restored dump brings the identifier of another server, or the
# `table_oid` of another table; a copy of the server's data, or of the database in it, keeps both. `system_identifier`:
# null if it could not be read. `fences_from`: what is added to the first fence of each timeline.
server_identity = Table(
    "server_identity",
    metadata,
    Column("is_only", Boolean, nullable=False, server_default=text("true")),
    Column("system_identifier", BigInteger),
    Column("table_oid", BigInteger, nullable=False),
    Column("fences_from", BigInteger, nullable=False, server_default="0"),
    Column("at", TIME, nullable=False, server_default=NOW),
    PrimaryKeyConstraint("is_only"),
    CheckConstraint("is_only", name="server_identity_is_only"),
)

# What nobody outside of the pool may know. `cursor` hides row ids, which count the jobs of all tenants, in cursors.
secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, nullable=False),
    Column("value", UUID(as_uuid=False), nullable=False, server_default=func.gen_random_uuid()),
    PrimaryKeyConstraint("name"),
)

audit = Table(
    "audit",
    metadata,
    identity(),
    Column("at", TIME, nullable=False, server_default=func.clock_timestamp()),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("details", JSONB),
    Index("audit_of_actor", "actor", "action", "subject", "at"),
)
