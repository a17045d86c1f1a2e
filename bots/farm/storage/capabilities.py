"""What the door tells clients that it can do: its own versions and actions, and the bounds of the storage."""

from typing import Any

from bots.farm.protos import remote_execution_pb2, semver_pb2
from bots.farm.storage.upstream import Upstream
from schema.validation import PRIORITY_MAX, PRIORITY_MIN

#: The oldest and the newest version of the protocol that the door speaks. Bazel up to 7 speaks 2.0 only, which some
#: storage servers do not announce.
LOWEST, HIGHEST = semver_pb2.SemVer(major=2), semver_pb2.SemVer(major=2, minor=3)
#: Largest batch of blobs in bytes. With the digests it has to fit into the 4 MiB that servers of gRPC take by default,
#: such as storage which announces all of them for blobs.
MOST_BATCH = 3 * 1024 * 1024
SHA256 = remote_execution_pb2.DigestFunction.SHA256


async def answer(upstream: Upstream) -> Any:
    """Return the capabilities. Raises grpc.aio.AioRpcError if the storage does not tell its own."""
    return described((await upstream.capabilities()).cache_capabilities)


def described(told: Any) -> Any:
    """Return the capabilities of a door before storage with these ones."""
    cache = remote_execution_pb2.CacheCapabilities()
    cache.CopyFrom(told)
    # What a later version of the protocol has added stands for calls that the door does not pass on.
    cache.DiscardUnknownFields()
    # Other functions are not checked by the door, and no client may store results.
    del cache.digest_functions[:]
    cache.digest_functions.append(SHA256)
    cache.action_cache_update_capabilities.update_enabled = False
    # 0 is no bound, but the door has one.
    cache.max_batch_total_size_bytes = min(told.max_batch_total_size_bytes or MOST_BATCH, MOST_BATCH)
    range_ = remote_execution_pb2.PriorityCapabilities.PriorityRange(
        min_priority=PRIORITY_MIN, max_priority=PRIORITY_MAX
    )
    priorities = remote_execution_pb2.PriorityCapabilities(priorities=[range_])
    return remote_execution_pb2.ServerCapabilities(
        cache_capabilities=cache,
        execution_capabilities=remote_execution_pb2.ExecutionCapabilities(
            digest_function=SHA256,
            digest_functions=[SHA256],
            exec_enabled=True,
            execution_priority_capabilities=priorities,
        ),
        low_api_version=LOWEST,
        high_api_version=HIGHEST,
    )
