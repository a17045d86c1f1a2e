"""The body of a request, from its bytes to the model of its route: read once, before any handler sees it, and on a
thread unless it is small and its route is one for crowds.

A handler says what it takes by the type of its parameter `body`, and gets it from `request.state`. The framework would
read it on the event loop, and a second time.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from schema import limits

#: A body of the wrong form, with only the first of what is wrong.
Invalid = RequestValidationError


class Reader:
    """Reads the bodies of one route."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model

    def read(self, raw: bytes) -> BaseModel:
        """The message in these bytes. May take a second of computing. Raises BadInput for what is not strict JSON,
        Invalid for what is not the route's message."""
        document = limits.parse_json(raw)
        try:
            return self.model.model_validate(document, from_attributes=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise Invalid([{**first, "loc": ("body", *first["loc"])}]) from None


#: A parameter in a path and how it is converted, which an OpenAPI document does not say.
_CONVERTED = re.compile(r"\{(\w+):\w+\}")


def reader(endpoint: Callable[..., Any]) -> Reader | None:
    """The reader for this handler's parameter `body`; None if it takes no body."""
    model = get_type_hints(endpoint).get("body")
    return None if model is None else Reader(model)


def describe(document: dict[str, Any], readers: Mapping[tuple[str, str], Reader]) -> None:
    """Add to an OpenAPI document what the routes at these paths, by these methods, take."""
    models: Sequence[tuple[type[BaseModel], Any]] = [(one.model, "validation") for one in readers.values()]
    references, defined = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in defined["$defs"].items():
        schemas.setdefault(name, schema)
    for (path, method), one in readers.items():
        content = {"application/json": {"schema": references[one.model, "validation"]}}
        document["paths"][_CONVERTED.sub(r"{\1}", path)][method.lower()]["requestBody"] = {
            "required": True,
            "content": content,
        }
