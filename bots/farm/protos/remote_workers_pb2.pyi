import datetime

from google.protobuf import any_pb2 as _any_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BotStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOT_STATUS_UNSPECIFIED: _ClassVar[BotStatus]
    OK: _ClassVar[BotStatus]
    UNHEALTHY: _ClassVar[BotStatus]
    HOST_REBOOTING: _ClassVar[BotStatus]
    BOT_TERMINATING: _ClassVar[BotStatus]
    INITIALIZING: _ClassVar[BotStatus]

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    PENDING: _ClassVar[LeaseState]
    ACTIVE: _ClassVar[LeaseState]
    COMPLETED: _ClassVar[LeaseState]
    CANCELLED: _ClassVar[LeaseState]
BOT_STATUS_UNSPECIFIED: BotStatus
OK: BotStatus
UNHEALTHY: BotStatus
HOST_REBOOTING: BotStatus
BOT_TERMINATING: BotStatus
INITIALIZING: BotStatus
LEASE_STATE_UNSPECIFIED: LeaseState
PENDING: LeaseState
ACTIVE: LeaseState
COMPLETED: LeaseState
CANCELLED: LeaseState

class BotSession(_message.Message):
    __slots__ = ("name", "bot_id", "status", "worker", "leases", "expire_time", "version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOT_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    bot_id: str
    status: BotStatus
    worker: Worker
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    expire_time: _timestamp_pb2.Timestamp
    version: str
    def __init__(self, name: _Optional[str] = ..., bot_id: _Optional[str] = ..., status: _Optional[_Union[BotStatus, str]] = ..., worker: _Optional[_Union[Worker, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., version: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("state", "status", "id", "payload", "result")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    state: LeaseState
    status: _status_pb2.Status
    id: str
    payload: _any_pb2.Any
    result: _any_pb2.Any
    def __init__(self, state: _Optional[_Union[LeaseState, str]] = ..., status: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., id: _Optional[str] = ..., payload: _Optional[_Union[_any_pb2.Any, _Mapping]] = ..., result: _Optional[_Union[_any_pb2.Any, _Mapping]] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("devices", "configs")
    class Config(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CONFIGS_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    configs: _containers.RepeatedCompositeFieldContainer[Worker.Config]
    def __init__(self, devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., configs: _Optional[_Iterable[_Union[Worker.Config, _Mapping]]] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("handle", "properties")
    class Property(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    handle: str
    properties: _containers.RepeatedCompositeFieldContainer[Device.Property]
    def __init__(self, handle: _Optional[str] = ..., properties: _Optional[_Iterable[_Union[Device.Property, _Mapping]]] = ...) -> None: ...

class CreateBotSessionRequest(_message.Message):
    __slots__ = ("parent", "bot_session")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BOT_SESSION_FIELD_NUMBER: _ClassVar[int]
    parent: str
    bot_session: BotSession
    def __init__(self, parent: _Optional[str] = ..., bot_session: _Optional[_Union[BotSession, _Mapping]] = ...) -> None: ...

class UpdateBotSessionRequest(_message.Message):
    __slots__ = ("name", "bot_session")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BOT_SESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    bot_session: BotSession
    def __init__(self, name: _Optional[str] = ..., bot_session: _Optional[_Union[BotSession, _Mapping]] = ...) -> None: ...
