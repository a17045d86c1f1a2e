"""How the tables whose rows change all the time are stored, and when they are vacuumed, as the migrations leave them.

A fill factor below 100 leaves room on each page, so that a changed row stays on its page and its indexes stay as they
are. A scale factor of 0.01 starts a vacuum when 1 % of the rows are dead instead of 20 %. A cost delay of 4 ms instead
of 2 lets a vacuum of a large table take twice as long, and less from those who work meanwhile.
"""

from collections.abc import Mapping

#: Table → storage parameters. A table that is not named has those of the server.
STORAGE: Mapping[str, Mapping[str, float]] = {
    "jobs": {
        "fillfactor": 45,
        "autovacuum_vacuum_scale_factor": 0.01,
        "autovacuum_analyze_scale_factor": 0.02,
        "autovacuum_vacuum_cost_delay": 4,
    },
    "leases": {"fillfactor": 45, "autovacuum_vacuum_scale_factor": 0.01, "autovacuum_vacuum_cost_delay": 4},
    "job_events": {"autovacuum_vacuum_cost_delay": 4},
    "job_payloads": {"autovacuum_vacuum_cost_delay": 4},
    "bots": {"fillfactor": 20, "autovacuum_vacuum_scale_factor": 0.01},
    "bot_success": {"fillfactor": 50, "autovacuum_vacuum_scale_factor": 0.01},
    "quotas": {"fillfactor": 50, "autovacuum_vacuum_scale_factor": 0.01},
    "graph_nodes": {"fillfactor": 70, "autovacuum_vacuum_scale_factor": 0.01},
}
