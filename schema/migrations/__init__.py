"""Every step of the tables from nothing to now; run by schema.migrate, never by hand."""
