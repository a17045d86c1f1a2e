"""The tables, as SQLAlchemy metadata. The baseline migration creates them from here.

It imports only the ground modules of `schema`. Read first: jobs.py and admission.py.
"""

from schema.sql import SCHEMA
from schema.tables import (
    admission,
    fleet,
    forecasts,
    graphs,
    jobs,
    journal,
    policies,
    policy_shadows,
    pool_samples,
    success,
    tenancy,
)
from schema.tables.columns import metadata

__all__ = [
    "SCHEMA",
    "admission",
    "fleet",
    "forecasts",
    "graphs",
    "jobs",
    "journal",
    "metadata",
    "policies",
    "policy_shadows",
    "pool_samples",
    "success",
    "tenancy",
]
