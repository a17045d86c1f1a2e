"""Filters on jobs, for lists and for acts on many jobs: one model and one set of checks for each way to ask."""

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from leasehold import wire
from leasehold.errors import BadInput
from leasehold.states import JobState
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from schema import validation
from schema.fields import Name


class Sort(StrEnum):
    """What a list is sorted by. Jobs without that time, such as the end of a running job, are not in the list."""

    SUBMITTED = "submitted"
    QUEUED = "queued"
    STARTED = "started"
    ENDED = "ended"
    PRIORITY = "priority"


class Direction(StrEnum):
    ASCENDING = "asc"
    DESCENDING = "desc"


def _checked(check: Callable[[str], str]) -> AfterValidator:
    def validate(value: str) -> str:
        try:
            return check(value)
        except BadInput as refused:
            raise ValueError(refused.reason) from None

    return AfterValidator(validate)


def pair(given: str) -> tuple[str, str]:
    """The key and the value of `KEY=VALUE`; the value may hold further equals signs."""
    key, _, value = given.partition("=")
    return key, value


def metadata_pair(given: str) -> str:
    """Return `given` if it is the `KEY=VALUE` of metadata that a job can have; raise BadInput."""
    if "=" not in given:
        raise BadInput("metadata", f"'{wire.escaped(given, 80)}' is not KEY=VALUE")
    key, value = pair(given)
    validation.check_metadata_key("metadata", key)
    validation.check_text("metadata", value, validation.MAX_METADATA_BYTES)
    return given


def _property_pair(given: str) -> str:
    if not all(pair(given)):
        raise BadInput("properties", f"'{wire.escaped(given, 80)}' is not KEY=VALUE")
    return validation.check_text("properties", given, validation.MAX_PROPERTY_BYTES)


def _moment(given: object) -> object:
    if isinstance(given, datetime):
        return given
    try:
        found = datetime.fromisoformat(str(given))
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        shown = wire.escaped(str(given), 60)
        raise ValueError(f"'{shown}' is not a time with its zone, such as 2026-03-01T12:00:00Z")
    return found


#: `KEY=VALUE`, as metadata and as a property.
Metadata = Annotated[str, _checked(metadata_pair)]
Property = Annotated[str, _checked(_property_pair)]
#: A time with its zone, in the form of RFC 3339.
Moment = Annotated[datetime, BeforeValidator(_moment)]
_Label = Annotated[str, _checked(lambda given: validation.check_text("label", given, validation.MAX_LABEL))]
_Task = Annotated[str, _checked(lambda given: validation.check_text("task", given, validation.MAX_PROPERTY_BYTES))]
_Priority = Annotated[int, Field(ge=validation.PRIORITY_MIN, le=validation.PRIORITY_MAX)]


class JobFilter(BaseModel):
    """What jobs must be like, all of it together. A field that is not given says nothing."""

    # Most commands use the names and the help of the fields only.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    state: list[JobState] = Field(default=[], max_length=len(JobState), description="Jobs in one of these states.")
    instance: Name | None = Field(default=None, description="Jobs of this instance.")
    cohort: Name | None = Field(default=None, description="Jobs of this cohort.")
    label: _Label | None = Field(default=None, description="Jobs with this label.")
    task: _Task | None = Field(default=None, description="Calls of this Python task, such as app.charge.")
    metadata: list[Metadata] = Field(
        default=[], max_length=validation.MAX_METADATA, description="Jobs with this value of a key of metadata."
    )
    properties: list[Property] = Field(
        default=[],
        max_length=validation.MAX_PROPERTIES,
        description="Jobs that require this value of a property, and maybe others.",
    )
    job_class: Name | None = Field(default=None, description="Jobs of this class.")
    owner: Name | None = Field(default=None, description="Jobs of this owner.")
    project: Name | None = Field(default=None, description="Jobs of this project.")
    unmatchable: bool = Field(
        default=False, description="Queued jobs that no present bot could run, even if it were idle."
    )
    bot: Name | None = Field(default=None, description="Jobs that this bot has, or was the last bot to have.")
    min_priority: _Priority | None = Field(
        default=None, description="Jobs with this priority or a higher number, which is less urgent."
    )
    max_priority: _Priority | None = Field(
        default=None, description="Jobs with this priority or a lower number, which is more urgent."
    )
    submitted_after: Moment | None = Field(default=None, description="Jobs submitted at this time or later.")
    submitted_before: Moment | None = Field(default=None, description="Jobs submitted before this time.")
    queued_after: Moment | None = Field(
        default=None,
        description="Jobs that came into the queue at this time or later. A blocked node of a graph goes by its "
        "submit.",
    )
    queued_before: Moment | None = Field(default=None, description="Jobs that came into the queue before this time.")
    started_after: Moment | None = Field(default=None, description="Jobs that last started at this time or later.")
    started_before: Moment | None = Field(default=None, description="Jobs that last started before this time.")
    ended_after: Moment | None = Field(default=None, description="Jobs that ended at this time or later.")
    ended_before: Moment | None = Field(default=None, description="Jobs that ended before this time.")

    def says_nothing(self) -> bool:
        """True if every job passes."""
        return not any(value not in (None, []) and value is not False for value in self.filter_fields().values())

    def filter_fields(self) -> dict[str, object]:
        """The fields of the filter itself, without those that a subclass adds."""
        return {name: getattr(self, name) for name in JobFilter.model_fields}


def default_sort(given: JobFilter) -> Sort:
    """The end if the filter names it, the priority of unmatchable jobs, else the submit: an index has this order."""
    if given.unmatchable:
        return Sort.PRIORITY
    return Sort.SUBMITTED if given.ended_after is None and given.ended_before is None else Sort.ENDED


def default_direction(sort: Sort) -> Direction:
    """The newest or the most urgent first; a lower priority is more urgent."""
    return Direction.ASCENDING if sort is Sort.PRIORITY else Direction.DESCENDING
