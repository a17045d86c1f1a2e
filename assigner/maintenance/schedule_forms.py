"""Schedules as requests and the configuration give them: fields and checks; and what the configuration declares."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Self

from leasehold import wire
from leasehold.errors import BadInput
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from assigner.maintenance.schedules import RESERVED, request_of
from schema import validation
from schema.fields import Name, Zone
from schema.policy import cron, schedule_changes
from schema.policy.cron import CatchUp
from schema.policy.schedule_changes import CONFIGURATION, AppliedSchedule, Author, DeclaredSchedule
from schema.policy.schedules import Overlap, ScheduleTerms
from schema.postgres.connection import Connection
from schema.requests import DEFAULT_INSTANCE, JobRequest, flat

#: Fields of a job that belong to its schedule.
OF_THE_SCHEDULE = ("instance", "key", "dedup_key", "schedule_after")
DAY = 86_400.0


class ScheduleForm(BaseModel):
    """The terms of a schedule, but for `enabled`, which each use of the form has in its own way."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    instance: Name | None = Field(
        default=None, description="Instance of the schedule and its jobs. Unset: that of the token, or `default`."
    )
    cron: str = Field(description=f"Cron expression of five fields: {wire.CRON_FIELDS}.")
    zone: Zone = Field(default="UTC", description="Time zone of the expression, such as Europe/Berlin.")
    catch_up: CatchUp = Field(
        default="skip",
        description="What is done about ticks that were missed in an outage: `skip` submits the newest one, `all` the "
        "newest `catch_up_most`, `none` none.",
    )
    catch_up_most: int = Field(default=10, ge=1, le=1000, description="Most missed ticks that `all` submits.")
    catch_up_seconds: float = Field(
        default=DAY,
        ge=0,
        le=validation.YEAR,
        description="Age in seconds up to which `skip` submits a missed tick.",
    )
    overlap: Overlap = Field(
        default="allow", description="`skip` leaves a tick out while the previous job of the schedule has not ended."
    )
    job: JobRequest = Field(description="The job, without instance, key, dedup_key and schedule_after.")

    @field_validator("job", mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        return flat(given)

    def terms(self, *, enabled: bool) -> ScheduleTerms:
        """The terms. Raises BadInput for a wrong expression, and for fields of the job that belong to the schedule."""
        for field in OF_THE_SCHEDULE:
            if getattr(self.job, field) is not None:
                raise BadInput(f"job.{field}", "belongs to the schedule and not to its job")
        for name in RESERVED:
            if name in self.job.metadata:
                raise BadInput("job.metadata", f"'{name}' is set by the schedule")
        return ScheduleTerms(
            cron=cron.check_cron("cron", self.cron),
            zone=self.zone,
            catch_up=self.catch_up,
            catch_up_most=self.catch_up_most,
            catch_up_seconds=self.catch_up_seconds,
            overlap=self.overlap,
            enabled=enabled,
            request=self.job.model_dump(mode="json", exclude_unset=True),
        )


class ScheduleSettings(ScheduleForm):
    """A schedule that the configuration declares.

    enabled: unset = a new schedule is enabled, and one that exists stays as `leasehold schedule enable` and `disable`
        have set it.
    """

    name: Name
    enabled: bool | None = None

    @field_validator("cron")
    @classmethod
    def _is_cron(cls, given: str) -> str:
        try:
            return cron.check_cron("cron", given)
        except BadInput as refused:
            raise ValueError(refused.reason) from None

    @model_validator(mode="after")
    def _can_be_submitted(self) -> Self:
        try:
            terms = self.terms(enabled=True)
            terms.next_tick(datetime(2000, 1, 1, tzinfo=UTC))
            request_of(
                terms.request,
                instance=self.instance or DEFAULT_INSTANCE,
                name=self.name,
                key=f"schedule:{self.name}:0",
                tick=None,
                level=None,
                estimate=None,
            )
        except BadInput as refused:
            raise ValueError(str(refused)) from None
        return self

    def declared(self) -> DeclaredSchedule:
        """What the configuration declares."""
        terms = self.terms(enabled=self.enabled is not False)
        return DeclaredSchedule(self.instance or DEFAULT_INSTANCE, self.name, terms, keeps_enabled=self.enabled is None)


def declare(connection: Connection, wanted: Sequence[ScheduleSettings], *, actor: str) -> list[AppliedSchedule]:
    """Store the schedules of the configuration, and remove those that it declared before and no longer does.

    Returns those that have another owner: they stay as they are. Raises Conflict as `apply_schedules` does.
    """
    done = schedule_changes.apply_schedules(
        connection,
        [each.declared() for each in wanted],
        instances=None,
        prune=True,
        author=Author(actor, source=CONFIGURATION),
    )
    return [each for each in done if each.outcome == "refused"]
