"""Assigners, upkeep, the callers' HTTP routes and the operators' commands: which job goes to which bot, and when."""
