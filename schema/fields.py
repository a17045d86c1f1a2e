"""Types of models' fields whose values are checked as `schema/validation.py` checks them, and the errors of models."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

from leasehold.errors import BadInput
from leasehold.wire import NAME_FORM, escaped, suggestion
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from schema import validation
from schema.validation import ResourceName

Model = TypeVar("Model", bound=BaseModel)

_NAME = f"^{validation.NAME.pattern}$"
_NAME_OR_PATTERN = rf"^({validation.NAME.pattern}|[a-z0-9][a-z0-9._-]{{0,61}}\*)$"
_LOCK = rf"^{validation.NAME.pattern}(:[1-9][0-9]{{0,8}})?$"
#: What is said of a text that does not have such a form.
_FORMS = {
    _NAME: f"is not a name: {NAME_FORM}",
    _NAME_OR_PATTERN: f"is neither a name nor the beginning of one and a '*': {NAME_FORM}",
    _LOCK: f"is neither a lock nor LOCK:SLOTS: {NAME_FORM}",
}
#: A name as a field of a model.
Name = Annotated[str, Field(pattern=_NAME)]
#: A name, or the beginning of one and a star. A star alone is refused.
NameOrPattern = Annotated[str, Field(pattern=_NAME_OR_PATTERN)]
#: A lock that a job names, and the slots that it has where no operator has set any: `NAME` or `NAME:SLOTS`.
JobLock = Annotated[str, Field(pattern=_LOCK)]
_PATTERN = re.compile("String should match pattern '(.*)'")
#: How pydantic words other errors, and what is said instead.
_PLAINER = (
    (re.compile("^Extra inputs are not permitted"), "there is no such field"),
    (re.compile("^Input should be a valid dictionary( or .*)?"), "input should be an object"),
)


def plain(message: str) -> str:
    """Return a message of pydantic in the words of SQL: with a small first letter, and no pattern that has a name."""
    message = message.removeprefix("Value error, ")
    found = _PATTERN.fullmatch(message)
    if found is not None:
        return _FORMS.get(found[1], message)
    for worded, plainly in _PLAINER:
        message = worded.sub(plainly, message)
    return f"{message[:1].lower()}{message[1:]}"


#: The name of a time zone as a field of a model.
Zone = Annotated[str, AfterValidator(lambda name: validation.load_zone(name).key)]
#: A time as a field of a model: a text with an offset, kept in UTC.
Moment = Annotated[str, AfterValidator(validation.normal_moment)]
#: Amounts that a job occupies, by resource.
Need = dict[ResourceName, Annotated[int, Field(ge=1, le=validation.MAX_RESOURCE)]]


def _counts_gpus_once(supply: dict[ResourceName, int]) -> dict[ResourceName, int]:
    gpus = supply.get("gpus")
    if gpus is not None and "gpu_milli" in supply:
        raise ValueError("gpu_milli means nothing together with gpus: each GPU has 1000")
    if gpus is not None and gpus > validation.MAX_GPUS:
        raise ValueError(f"gpus is at most {validation.MAX_GPUS}")
    return supply


#: Amounts that a bot has, by resource.
Supply = Annotated[
    dict[ResourceName, Annotated[int, Field(ge=0, le=validation.MAX_RESOURCE)]], AfterValidator(_counts_gpus_once)
]


def _stored_label(value: str) -> str:
    try:
        return validation.check_text("label", value, validation.MAX_LABEL)
    except BadInput as error:
        raise ValueError(error.reason) from None


#: A label as a field of a model.
Label = Annotated[str, Field(min_length=1), AfterValidator(_stored_label)]


def as_stored(model: type[Model], values: Mapping[str, Any]) -> tuple[Model, str | None]:
    """Return stored values as their model, and why it does not take them any more; None if it does.

    What was valid when it was stored may not be valid here: another host has other time zones, another version other
    rules. So whoever reads many rows takes each as it is, and does without the one that is wrong.
    """
    try:
        return model.model_validate(values), None
    except ValidationError as error:
        return model.model_construct(**values), first_refusal(error)


def misspelt(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    """The text `; did you mean 'x'?` for an error of pydantic about a field that a part of the model does not have.

    Empty if the error is another one, or if no field of that part has a similar name.
    """
    if error["type"] != "extra_forbidden":
        return ""
    *place, wrong = error["loc"]
    part: type[BaseModel] | None = model
    for step in place:
        if isinstance(step, str) and part is not None:
            info = part.model_fields.get(step)
            part = None if info is None else _model_in(info.annotation)
    return "" if part is None else suggestion(str(wrong), part.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in the type of a field, such as that of the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def first_error(error: ValidationError) -> tuple[str, str]:
    """The field of the first error, "" if it is about the whole value, and what is wrong with it, in one line.

    The words are those in which HTTP refuses it.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(escaped(str(part), 60) for part in first["loc"])
    return field, escaped(plain(first["msg"]))


def first_refusal(error: ValidationError, whole: str = "") -> str:
    """The first error in one line, as `first_error` tells it. whole: the name of the whole value, "" for none."""
    field, said = first_error(error)
    return f"{field or whole}: {said}" if field or whole else said


def first_errors(document: Any, place: str, most: int, validate: Callable[[Any], object]) -> list[dict[str, Any]]:
    """Return the first error of each wrong item of a list of the document.

    place: the name of the list, of which `most` items are looked at. validate: raises ValidationError for a wrong item.
    """
    given = document.get(place) if isinstance(document, dict) else None
    found: list[dict[str, Any]] = []
    for index, each in enumerate(given[:most] if isinstance(given, list) else ()):
        try:
            validate(each)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            found.append({**first, "loc": (place, index, *first["loc"])})
    return found
