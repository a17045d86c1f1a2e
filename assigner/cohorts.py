"""The assigner of one cohort: its bots and its jobs."""

from assigner.cycle import PriorityAgeAssigner


class CohortAssigner(PriorityAgeAssigner):
    """One thread for each cohort. Cohorts share no bots and no queues, so that these threads do not meet."""
