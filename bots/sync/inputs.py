"""The results of earlier nodes of a graph, for the bot that holds the lease of a node which depends on them."""

import json
from typing import Any
from uuid import UUID

from leasehold.errors import BadInput, Conflict

from bots.protocol import AskInputs
from schema.postgres.connection import Connection
from schema.postgres.statements import Statement
from schema.sql import NOT_OVER

LEASED = Statement(f"""
SELECT j.id FROM jobs j CROSS JOIN LATERAL (
    SELECT bot_id, state FROM leases WHERE job_id = j.id AND fence = :fence OFFSET 0) l
WHERE j.public_id = :job AND l.bot_id = :bot AND l.{NOT_OVER}
""")
# By the edges, which lead to the newest job of a node that was tried again.
RESULTS = Statement("""
SELECT n.node_no, n.outcome, CAST(r.result AS text) AS result
FROM (SELECT parent FROM graph_edges WHERE child = :job) e
CROSS JOIN LATERAL (SELECT node_no, outcome FROM graph_nodes WHERE job_id = e.parent OFFSET 0) n
LEFT JOIN job_results r ON r.job_id = e.parent
WHERE n.node_no = ANY (CAST(:nodes AS integer[]))
""")


def read_inputs(connection: Connection, bot: int, asked: AskInputs) -> dict[str, Any]:
    """Return the state and the result of each of these nodes on which the node of a lease depends, by their numbers.

    The bot's session has been checked. Raises Conflict `lease_over` if it has not, or has no more, this lease.
    """
    try:
        job = UUID(asked.job)
    except ValueError:
        raise BadInput("job", "is not the id of a job") from None
    leased = connection.execute(LEASED, {"job": job, "fence": asked.fence, "bot": bot}).scalar_one_or_none()
    if leased is None:
        raise Conflict("lease_over", "the bot does not hold this lease")
    rows = connection.execute(RESULTS, {"job": leased, "nodes": asked.nodes}).all()
    return {
        str(row.node_no): {"state": row.outcome, "result": None if row.result is None else json.loads(row.result)}
        for row in rows
    }
