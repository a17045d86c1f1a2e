"""Everything that speaks HTTP to bots and callers: the gateway, the reference bot, the client and its commands."""
