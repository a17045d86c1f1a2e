"""What the descriptions of the tables are made of: the one MetaData, and the parts that several tables share."""

from sqlalchemy import BigInteger, Column, Identity, Integer, MetaData, text
from sqlalchemy.dialects.postgresql import TIMESTAMP

SCHEMA = "leasehold"

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={"pk": "%(table_name)s_pkey"},
)

TIME = TIMESTAMP(timezone=True)
NOW = text("now()")
NO_LABELS = text("'{}'::text[]")


def name_form(column: str = "name") -> str:
    """The condition that a column holds a name."""
    return f"{column} ~ '^[a-z0-9][a-z0-9._-]{{0,62}}$'"


def identity(kind: type[BigInteger] | type[Integer] = BigInteger) -> Column[int]:
    """An `id` that the database counts."""
    return Column("id", kind, Identity(), primary_key=True)
