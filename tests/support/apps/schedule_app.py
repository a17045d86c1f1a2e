"""An app that declares schedules."""

from leasehold.pool import Pool

pool = Pool.from_env(app="reports")


@pool.periodic(
    "*/5 * * * *", timezone="Europe/Berlin", name="mail", args=("all",), kwargs={"loud": True}, overlap="skip"
)
@pool.periodic("0 0 1 * *", catch_up="all", catch_up_most=3, args=("monthly",))
@pool.task(name="reports.send", retries=2, label="mail", instance="office")
def send(what: str, *, loud: bool = False) -> str:
    """Return what was sent."""
    return f"{what}{'!' if loud else ''}"
