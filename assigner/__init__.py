"""Opinions: which job goes to which bot, and when."""
