"""Conversations: sessions and leases, over HTTP."""
