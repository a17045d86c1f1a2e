"""High availability: templates of a replicated PostgreSQL for production, and a run that breaks it under load.

`templates/` holds configurations for Patroni, etcd and HAProxy. `python -m ops.ha.run` starts three members from these
same files, each in namespaces of its own, runs a pool on them, and kills, cuts off and switches primaries.
Read first: `cluster`, which runs the members, and `run`, which says what is done to them. Everything here may import
the product and `ops.chaos`, and nothing of the product imports it.
"""
