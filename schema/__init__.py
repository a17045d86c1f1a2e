"""Facts: what is true of jobs, leases and bots, whoever writes it."""
