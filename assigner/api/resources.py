"""The routes of operator resources, made from their declarations: list, show, set, remove, and the effect of a change.

The gateway mounts these routes. Its middleware admits only operators and has read the body. The handlers use
`app.state`: `run` (work in a transaction, on a thread), `callers` (calls on a thread), `database` and `sync_service`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from leasehold import wire
from leasehold.errors import Conflict, NotFound
from leasehold.wire import escaped
from pydantic import BaseModel, ConfigDict, Field, create_model

from assigner.api.routing import MAX_REASON_BYTES, OPERATORS, Caller, Read, problems
from assigner.operator_resources.declaration import ALL, By, Irremovable, Keys, Page, Removal, Resource, Setting
from assigner.operator_resources.registry import RESOURCES
from schema import declarations, validation
from schema.policy import versions
from schema.postgres.connection import Connection
from schema.tenancy import instances
from schema.tenancy.tokens import Principal

#: The most figures in one answer about the effect of a change.
MAX_AFFECTED = 500
#: Error code for the removal of an item that cannot be removed.
IRREMOVABLE = "irremovable"

Reason = Annotated[str, Query(max_length=MAX_REASON_BYTES, description="for the audit; at most 500 bytes")]
After = Annotated[str, Query(description="only items with later names: the next page")]
Create = Annotated[bool, Query(description="make the instance if it is not there; false = refuse it then")]
Limit = Annotated[int, Query(ge=1, le=wire.MAX_LIST)]
#: Consoles of earlier versions send a limit to lists that have one page, and to single objects. It changes nothing.
_UNPAGED = {"ignored": (Annotated[str, Query(alias="limit", include_in_schema=False)], "")}


class Done(BaseModel):
    """The name of the item that was set or removed, with further fields of the answer."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="its keys, with slashes between them")


class AffectedFigure(BaseModel):
    """One figure of an instance, now and after the change; unset = there is none."""

    model_config = ConfigDict(from_attributes=True)

    instance: str
    cohort: str | None = Field(description="unset: the figure is of no cohort")
    field: str = Field(
        description="in units: min, max, effective_max, room (may still be given), over (used above the maximum), "
        "opportunistic (used above the minimum), reclaimable (of others), capacity_gap (not to be had); "
        "weight; share (part of all weights, 0 to 1); budget, max_concurrent and slots, as in the share"
    )
    before: float | None
    after: float | None


class EffectAnswer(BaseModel):
    """What a change would do, which has not been made."""

    name: str = Field(description="the keys of what would be changed, with slashes between them")
    affected: list[AffectedFigure] = Field(description=f"the first {MAX_AFFECTED} figures that would change")
    left_out: int = Field(description="further figures that would change")


def router_of(resources: Iterable[Resource[Any]]) -> APIRouter:
    """Make the routes of these resources."""
    router = APIRouter(prefix="/v1", tags=["operators"])
    for resource in resources:
        path = _path(resource)
        if resource.keys:
            _add_list(router, resource)
        _add_show(router, resource, path)
        for setting in (resource.set, *resource.older):
            _add_setting(router, resource, setting, path)
        if resource.effect is not None:
            _add_effect(router, resource, resource.effect, path)
        _add_removal(router, resource, path)
    return router


def _add_list(router: APIRouter, resource: Resource[Any]) -> None:
    fields: Any = {resource.field: (list[resource.row], ...)}  # type: ignore[name-defined]
    answer = create_model(f"{resource.row.__name__}List", **fields)

    async def handler(request: Request, after: str = "", limit: int = wire.MAX_LIST, **_: str) -> Any:
        page = _page(request, validation.check_text("after", after, 63), limit)
        found = await request.app.state.run(lambda connection: list(resource.rows(connection, page)))
        return {resource.field: found}

    paged = {"after": (After, ""), "limit": (Limit, wire.MAX_LIST)} if resource.paged else _UNPAGED
    _signed(handler, f"list_{resource.field}", f"List. {resource.help}", {}, paged)
    router.add_api_route(
        f"/{resource.plural}",
        handler,
        response_model=answer,
        responses=problems(*([400] if resource.paged else [])),
        openapi_extra=OPERATORS,
    )


def _add_show(router: APIRouter, resource: Resource[Any], path: str) -> None:
    async def handler(request: Request, **given: str) -> Any:
        keys = [given[key.name] for key in resource.keys]
        page = _page(request, "", wire.MAX_LIST)
        return await request.app.state.run(lambda connection: _shown(connection, resource, keys, page))

    more = {} if resource.keys else _UNPAGED
    _signed(handler, f"show_{resource.field}", f"Show one. {resource.help}", _keys(resource), more)
    router.add_api_route(path, handler, response_model=resource.row, responses=problems(404), openapi_extra=OPERATORS)


def _add_setting(router: APIRouter, resource: Resource[Any], setting: Setting[Any], path: str) -> None:
    async def handler(request: Request, body: Any, caller: Principal, create: bool = False, **given: str) -> Any:
        keys = [given[key.name] for key in resource.keys]
        by: By = {"actor": caller.actor, "reason": validation.check_text("reason", body.reason, MAX_REASON_BYTES)}

        def work(connection: Connection) -> Mapping[str, Any]:
            with _as_version(connection, resource, by):
                _refuse_declared(connection, resource, resource.claims(setting, keys, body))
                _require_instance(connection, resource, keys, by, create=create)
                (fields,) = setting.put(connection, [(keys, body)], by)
                return fields or {}

        fields: Mapping[str, Any] = await request.app.state.run(work)
        if setting.then is not None:
            following, state = setting.then, request.app.state
            fields = {**fields, **await state.callers.call(lambda: following(state.database, caller.actor))}
        return {"name": resource.named(keys), **fields}

    _signed(
        handler,
        f"{setting.method.lower()}_{resource.field}",
        setting.help,
        _keys(resource),
        _of_change(resource, setting),
    )
    handler.__annotations__ = {"body": setting.model}
    router.add_api_route(
        path,
        handler,
        methods=[setting.method],
        response_model=Done,
        responses=problems(400, 404, 408, 409, 413, 415),
        openapi_extra=OPERATORS,
    )


def _add_effect(
    router: APIRouter,
    resource: Resource[Any],
    effect: Callable[[Connection, Page, Callable[[], object]], Sequence[Any]],
    path: str,
) -> None:
    setting = resource.set

    async def handler(
        request: Request, body: Any, caller: Principal, create: bool = False, **given: str
    ) -> EffectAnswer:
        keys = [given[key.name] for key in resource.keys]
        by: By = {"actor": caller.actor, "reason": validation.check_text("reason", body.reason, MAX_REASON_BYTES)}
        page = _page(request, "", wire.MAX_LIST)

        def work(connection: Connection) -> EffectAnswer:
            def change() -> None:
                _require_instance(connection, resource, keys, by, create=create)
                setting.put(connection, [(keys, body)], by)

            _refuse_declared(connection, resource, resource.claims(setting, keys, body))
            found = effect(connection, page, change)
            shown = [AffectedFigure.model_validate(each) for each in found[:MAX_AFFECTED]]
            return EffectAnswer(name=resource.named(keys), affected=shown, left_out=len(found) - len(shown))

        answer: EffectAnswer = await request.app.state.run(work)
        return answer

    _signed(
        handler,
        f"effect_{resource.field}",
        f"Tell what this would change for whom, and change nothing: {setting.help}",
        _keys(resource),
        _of_change(resource, setting),
    )
    handler.__annotations__ = {"body": setting.model}
    router.add_api_route(
        f"{path}/effect",
        handler,
        methods=["POST"],
        response_model=EffectAnswer,
        responses=problems(400, 404, 408, 409, 413, 415),
        openapi_extra=OPERATORS,
    )


def _add_removal(router: APIRouter, resource: Resource[Any], path: str) -> None:
    removal = resource.remove

    async def handler(request: Request, caller: Principal, reason: str = "", **given: str) -> Any:
        if isinstance(removal, Irremovable):
            raise Conflict(IRREMOVABLE, f"{resource.name}: cannot be removed: {removal.reason}")
        keys = [given[key.name] for key in resource.keys]
        await request.app.state.run(lambda connection: _remove(connection, resource, removal, keys, caller, reason))
        return {"name": resource.named(keys)}

    description = removal.help if isinstance(removal, Removal) else f"Refused: {removal.reason}."
    more = {"caller": (Caller, Parameter.empty), "reason": (Reason, "")}
    _signed(handler, f"remove_{resource.field}", description, _keys(resource), more)
    router.add_api_route(
        path,
        handler,
        methods=["DELETE"],
        response_model=Done,
        responses=problems(400, 404, 409),
        openapi_extra=OPERATORS,
    )


def _remove(
    connection: Connection, resource: Resource[Any], removal: Removal, keys: Keys, caller: Principal, reason: str
) -> None:
    by: By = {"actor": caller.actor, "reason": validation.check_text("reason", reason, MAX_REASON_BYTES)}
    with _as_version(connection, resource, by):
        _refuse_declared(connection, resource, resource.claims(None, keys, None))
        removal.remove(connection, [keys], by)


@contextmanager
def _as_version(connection: Connection, resource: Resource[Any], by: By) -> Iterator[None]:
    """Let changes of what decides take turns, and make a version of what has changed."""
    if resource.name not in versions.DECIDING:
        yield
        return
    versions.hold(connection)
    yield
    versions.note_change(connection, **by)


def _refuse_declared(connection: Connection, resource: Resource[Any], claims: Mapping[str, Iterable[str]]) -> None:
    for kind, names in claims.items():
        declarations.refuse(connection, kind, list(names), section=resource.section or "")


def _require_instance(connection: Connection, resource: Resource[Any], keys: Keys, by: By, *, create: bool) -> None:
    """Raise NotFound if the change is for an instance that is not there, unless it is to be made."""
    for key, value in zip(resource.keys, keys, strict=True):
        if key.instance and value != ALL:
            instances.require(connection, value, field=key.name, create=create, **by)


def _shown(connection: Connection, resource: Resource[Any], keys: Keys, page: Page) -> Any:
    if resource.show is not None:
        return resource.show(connection, keys, page)
    for row in resource.rows(connection, page):
        seen = resource.row.model_validate(row)
        if all(str(getattr(seen, key.name) or ALL) == value for key, value in zip(resource.keys, keys, strict=True)):
            return row
    raise NotFound(f"{resource.name}: there is no '{escaped('/'.join(keys), 127)}'")


def _page(request: Request, after: str, limit: int) -> Page:
    return Page(after, limit, request.app.state.sync_service.cooldown)


def _path(resource: Resource[Any]) -> str:
    """Return the path of one item in the notation of FastAPI."""
    path = resource.item_path
    for key in resource.keys:
        if key.slashes:
            path = path.replace(f"{{{key.name}}}", f"{{{key.name}:path}}")
    return path


def _keys(resource: Resource[Any]) -> dict[str, tuple[Any, Any]]:
    return {key.name: (str, Parameter.empty) for key in resource.keys}


def _of_change(resource: Resource[Any], setting: Setting[Any]) -> dict[str, tuple[Any, Any]]:
    """The parameters of a route that makes a change, beside the keys."""
    create = {"create": (Create, False)} if resource.of_instance else {}
    return {"body": (Annotated[setting.model, Read], Parameter.empty), "caller": (Caller, Parameter.empty), **create}


def _signed(
    handler: Callable[..., Any],
    name: str,
    description: str,
    keys: Mapping[str, tuple[Any, Any]],
    more: Mapping[str, tuple[Any, Any]],
) -> None:
    """Set the signature that FastAPI reads, and the handler's name and description in `/openapi.json`."""
    parameters = {"request": (Request, Parameter.empty), **keys, **more}
    handler.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(each, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for each, (annotation, default) in parameters.items()
        ]
    )
    handler.__name__, handler.__doc__ = name, description


router = router_of(RESOURCES)
