"""Have no rate and no weight above 0 and below 1e-9: PostgreSQL fails on what is too small or too large for a double.

Each read of such a bucket failed, and each division by such a weight, and with it the cycle of the assigner.
"""

from alembic import op

revision = "0067"
down_revision = "0066"
branch_labels = None
depends_on = None

CHANGES = (
    "UPDATE rate_buckets SET rate = 1e-9 WHERE rate < 1e-9",
    "UPDATE limit_patterns SET rate = 1e-9 WHERE rate < 1e-9",
    "ALTER TABLE rate_buckets DROP CONSTRAINT IF EXISTS rate_buckets_rate_range",
    "ALTER TABLE rate_buckets ADD CONSTRAINT rate_buckets_rate_range CHECK (rate >= 1e-9 AND rate <= 1e6)",
    "ALTER TABLE limit_patterns DROP CONSTRAINT IF EXISTS limit_patterns_rate_range",
    """
    ALTER TABLE limit_patterns ADD CONSTRAINT limit_patterns_rate_range
    CHECK (rate >= 1e-9 AND rate <= 1e6 AND burst BETWEEN 1 AND 1000000)
    """,
    "UPDATE accounts SET credit_weight = 0 WHERE credit_weight > 0 AND credit_weight < 1e-9",
    "UPDATE accounts SET lift_weight = 0 WHERE lift_weight > 0 AND lift_weight < 1e-9",
    "ALTER TABLE accounts DROP CONSTRAINT IF EXISTS accounts_credit_weight_range",
    """
    ALTER TABLE accounts ADD CONSTRAINT accounts_credit_weight_range
    CHECK (credit_weight = 0 OR credit_weight >= 1e-9 AND credit_weight <= 1e6)
    """,
)


def upgrade() -> None:
    for change in CHANGES:
        op.execute(change)


def downgrade() -> None:
    """Do nothing: the version before works with the narrower range."""
