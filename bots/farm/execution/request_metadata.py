"""What clients say of the builds that their calls belong to, as metadata of jobs."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from bots.farm.protos import remote_execution_pb2
from schema.validation import MAX_METADATA_BYTES

#: The headers that have it, by newer and older clients. Both have the same message.
HEADERS = (
    "build.bazel.remote.execution.v2.requestmetadata-bin",
    "google.devtools.remoteexecution.v1test.requestmetadata-bin",
)


def metadata(headers: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the metadata of a job by the headers of a call; what is not told is left out.

    It decides nothing, so a header that cannot be read says nothing.
    """
    for name, value in headers:
        if name in HEADERS:
            try:
                told = remote_execution_pb2.RequestMetadata.FromString(value)
            except (DecodeError, TypeError):
                continue
            found = {key: _fitting(value) for key, value in _told(told).items()}
            return {key: value for key, value in found.items() if value}
    return {}


def _told(told: Any) -> dict[str, str]:
    tool = told.tool_details
    return {
        "invocation": told.tool_invocation_id,
        "correlated": told.correlated_invocations_id,
        "target": told.target_id,
        "mnemonic": told.action_mnemonic,
        "tool": " ".join(each for each in (tool.tool_name, tool.tool_version) if each),
    }


def _fitting(text: str) -> str:
    """The text as metadata may be: printable, and not too long."""
    printable = "".join(each if each.isprintable() else "?" for each in text[:MAX_METADATA_BYTES])
    return printable.encode()[:MAX_METADATA_BYTES].decode(errors="ignore")
