"""What the pool tells operators: fairness samples, gateway processes, settings in force and samples of decisions."""

from alembic import op

from schema.tables.tenancy import decision_samples, gateways

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_REPORTED = {"config_file": "text", "config_error": "text", "settings": "jsonb", "settings_at": "timestamptz"}
_FAIRNESS = "pool_samples_fairness_of_pool"


def upgrade() -> None:
    op.execute("ALTER TABLE pool_samples ADD COLUMN IF NOT EXISTS fairness double precision")
    op.execute(f"ALTER TABLE pool_samples DROP CONSTRAINT IF EXISTS {_FAIRNESS}")
    op.execute(
        f"ALTER TABLE pool_samples ADD CONSTRAINT {_FAIRNESS}"
        " CHECK (fairness IS NULL OR fairness > 0 AND fairness < 1.000001 AND scope = 'pool')"
    )
    columns = ", ".join(f"ADD COLUMN IF NOT EXISTS {name} {kind}" for name, kind in _REPORTED.items())
    op.execute(f"ALTER TABLE assigners {columns}")
    for table in (gateways, decision_samples):
        table.create(op.get_bind(), checkfirst=True)


def downgrade() -> None:
    """Drop what processes have told. A baseline of this version drops what is left."""
    for table in (decision_samples, gateways):
        table.drop(op.get_bind(), checkfirst=True)
    op.execute(f"ALTER TABLE assigners {', '.join(f'DROP COLUMN IF EXISTS {name}' for name in _REPORTED)}")
    op.execute("ALTER TABLE pool_samples DROP COLUMN IF EXISTS fairness")
