"""Measurements of a running pool over HTTP: real processes of assigner and gateway.

`throughput` measures busy and idle bots on one gateway, `latency` the wait of a job in an idle pool, `siege` a gateway
that strangers attack; `wire` has the bots. May import the modules of `ops.bench` beside it.
"""
