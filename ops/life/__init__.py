"""A pool that lives months on a virtual clock, with callers, operators and bots that act by seeded chance."""
