"""Tables of dependency graphs: graphs, their nodes with the number of unmet dependencies, and edges.

The number of unmet dependencies is stored here and not in `jobs`, so that jobs outside graphs cost nothing more.
"""

from sqlalchemy import (
    BigInteger,
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
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, UUID

from schema.tables.columns import NOW, TIME, identity, metadata, name_form

graphs = Table(
    "graphs",
    metadata,
    identity(),
    Column("public_id", UUID(as_uuid=True), nullable=False, server_default=func.gen_random_uuid()),
    Column("instance", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False, server_default="active"),
    Column("key", Text),
    Column("request_hash", LargeBinary),
    Column("priority", Integer, nullable=False, server_default=text("0")),
    Column("nodes", Integer, nullable=False),
    Column("edges", Integer, nullable=False),
    Column("ready", Integer, nullable=False),
    Column("missing", ARRAY(Integer), nullable=False, server_default=text("'{}'::integer[]")),
    Column("actor", Text, nullable=False),
    Column("created_at", TIME, nullable=False, server_default=NOW),
    Column("finished_at", TIME),
    UniqueConstraint("public_id", name="graphs_public_id_key"),
    UniqueConstraint("instance", "key", name="graphs_key_key"),
    CheckConstraint(name_form(), name="graphs_name_form"),
    CheckConstraint("state IN ('active', 'replaced', 'cancelled', 'finished')", name="graphs_state_known"),
    CheckConstraint("state <> 'finished' OR finished_at IS NOT NULL", name="graphs_finished_is_over"),
    CheckConstraint("octet_length(key) BETWEEN 1 AND 200", name="graphs_key_bounded"),
    CheckConstraint("nodes >= 1 AND edges >= 0 AND ready BETWEEN 0 AND nodes", name="graphs_counts_sound"),
    Index("graphs_of_name", "instance", "name", "id"),
    Index("graphs_active", "instance", "name", unique=True, postgresql_where=text("state = 'active'")),
    Index("graphs_open", "id", postgresql_where=text("finished_at IS NULL")),
    Index("graphs_finished", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
)

graph_nodes = Table(
    "graph_nodes",
    metadata,
    Column("job_id", BigInteger, autoincrement=False, nullable=False),
    Column("graph", BigInteger, nullable=False),
    Column("node_no", Integer, nullable=False),
    Column("depth", Integer, nullable=False),
    Column("pending_deps", Integer, nullable=False),
    Column("dead_ends", Integer, nullable=False),
    Column("missing", ARRAY(Integer), nullable=False, server_default=text("'{}'::integer[]")),
    Column("queue_timeout_seconds", Double),
    # When its job may start at the earliest, once nothing blocks it: a time, or seconds after that.
    Column("schedule_after", TIME),
    Column("delay", Double),
    Column("outcome", Text),
    Column("due", Boolean, nullable=False, server_default=text("false")),
    # Of a callback: by what became of all other nodes it runs.
    Column("callback", Text),
    PrimaryKeyConstraint("job_id"),
    UniqueConstraint("graph", "node_no", name="graph_nodes_no_key"),
    CheckConstraint("depth >= 0", name="graph_nodes_depth_positive"),
    CheckConstraint("dead_ends >= 0 AND pending_deps >= dead_ends", name="graph_nodes_counts_sound"),
    CheckConstraint("outcome IN ('succeeded', 'failed', 'cancelled', 'dead')", name="graph_nodes_outcome_final"),
    CheckConstraint("callback IN ('done', 'succeeded', 'failed')", name="graph_nodes_callback_known"),
    Index("graph_nodes_open", "graph", postgresql_where=text("outcome IS NULL")),
    Index("graph_nodes_stuck", "graph", postgresql_where=text("dead_ends > 0 AND outcome IS NULL")),
    Index("graph_nodes_due", "job_id", postgresql_where=text("due AND outcome IS NULL")),
)

graph_edges = Table(
    "graph_edges",
    metadata,
    Column("parent", BigInteger, nullable=False),
    Column("child", BigInteger, nullable=False),
    Column("on_failure", Text, nullable=False),
    # The child had started when its parent was tried again, and does not wait for it.
    Column("passed", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("parent", "child"),
    CheckConstraint("parent <> child", name="graph_edges_no_loop"),
    CheckConstraint("on_failure IN ('block', 'run', 'cancel')", name="graph_edges_on_failure_known"),
    Index("graph_edges_of_child", "child", "parent"),
)
