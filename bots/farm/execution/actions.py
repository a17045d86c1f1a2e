"""From an action to the job that runs it, and back: which action a job runs is derived from the job alone. Pure.

The job's command is `leasehold-action`, which gets the action itself, since it is small. Old clients name output files
and directories apart, which newer runners ignore: their command is rewritten to one list of output paths. Answers and
the cache go by the digest of the action that the client knows; so what becomes of a job's result depends on this
module, and what a job should run is derived anew, and compared by `runs`, before its result is stored.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.errors import BadInput

from bots.farm.execution import properties
from bots.farm.protos import remote_execution_pb2
from bots.farm.settings import FarmSettings
from bots.farm.storage.upstream import Digest, parsed
from schema.requests import DEFAULT_INSTANCE, JobRequest
from schema.validation import ACTION_KEY, FARM, OF_FARM, RUN_ACTION, YEAR

#: The options of `leasehold-action` that doors give it, and the settings of the door from which they come.
SETTINGS = {
    "--cas": "bots_reach",
    "--ca": "bots_ca",
    "--token-file": "bots_token_file",
    "--cert": "bots_cert",
    "--key": "bots_key",
    "--mount": "mounts",
}
#: Exit code with which `leasehold-action` says that it could not run the action, so that another try may help.
NOT_RUN = 70
#: Exit codes of a bot that cannot start `leasehold-action`, where it is not installed as it should be.
NOT_STARTED = (126, 127)
#: Seconds before another try of an action that could not be run.
TRY_AGAIN = 1.0
#: Bytes of an action that a job takes: its command line has it in base64, and Linux starts no program with a word of
#: more than 128 KiB. A bot would only try in vain.
MOST_ACTION = 96 * 1024 - 64


@dataclass(frozen=True)
class Runnable:
    """An action as a runner takes it.

    digest: that by which the client and the cache know it. action: its bytes, with what the runner needs changed.
    command: the bytes of its command if they are not the client's, which the storage must get; None = it has them.
    root: the directory of its inputs.
    """

    digest: Digest
    action: bytes
    command: bytes | None
    root: Digest
    properties: Mapping[str, Sequence[str]]
    seconds: float | None
    cacheable: bool


def runnable(digest: Digest, action: bytes, command: bytes) -> Runnable:
    """Return the action of this digest as a runner takes it. Raises BadInput."""
    asked = parsed(remote_execution_pb2.Action, action, "action")
    wanted = parsed(remote_execution_pb2.Command, command, "command")
    if not wanted.arguments:
        raise BadInput("command.arguments", "must name a program")
    rewritten = None
    if not wanted.output_paths and (wanted.output_files or wanted.output_directories):
        wanted.output_paths.extend(sorted({*wanted.output_files, *wanted.output_directories}))
        del wanted.output_files[:]
        del wanted.output_directories[:]
        rewritten = wanted.SerializeToString(deterministic=True)
        asked.command_digest.CopyFrom(Digest.of(rewritten).message)
    seconds = _seconds(asked)
    if asked.timeout.nanos:
        # Runners take whole seconds only, and less than one for no limit.
        asked.timeout.seconds, asked.timeout.nanos = asked.timeout.seconds + 1, 0
    changed = asked.SerializeToString(deterministic=True)
    if len(changed) > MOST_ACTION:
        raise BadInput("action", f"has {len(changed)} bytes, at most {MOST_ACTION} are allowed")
    return Runnable(
        digest,
        changed,
        rewritten,
        Digest.read(asked.input_root_digest, "action.input_root_digest"),
        properties.asked(asked.platform if asked.HasField("platform") else wanted.platform),
        seconds,
        not asked.do_not_cache,
    )


def request(
    wanted: Runnable,
    settings: FarmSettings,
    *,
    address: str,
    instance: str = DEFAULT_INSTANCE,
    priority: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> JobRequest:
    """Return the job that runs an action, without what is reserved for the door. Raises BadInput, ValidationError.

    address: of the door, by which bots reach it.
    """
    timeout = None if wanted.seconds is None else wanted.seconds + settings.staging_seconds
    place = properties.placement(wanted.properties, settings.properties)
    return JobRequest(
        command=command(wanted, settings, address=address),
        instance=instance,
        properties={name: list(values) for name, values in place.required.items()},
        preferred_properties={name: list(values) for name, values in place.preferred.items()},
        prefer_seconds=settings.properties.prefer_seconds if place.preferred else None,
        label=place.label,
        units=place.units,
        resources=dict(place.resources),  # type: ignore[arg-type]  # the settings name kinds only
        priority=priority,
        metadata=dict(metadata or {}),
        timeout_seconds=timeout,
        queue_timeout_seconds=settings.queue_seconds,
        max_attempts=settings.max_attempts,
        retry_failed=True,
        retry={"exit_codes": [NOT_RUN, *NOT_STARTED], "base": TRY_AGAIN},  # type: ignore[arg-type]  # pydantic makes it a RetryPolicy
    )


def command(wanted: Runnable, settings: FarmSettings, *, address: str) -> list[str]:
    """Return the command line of the job that runs an action."""
    mounts = [f"--mount={each}" for each in settings.mounts]
    files = {
        "--ca": settings.bots_ca,
        "--token-file": settings.bots_token_file,
        "--cert": settings.bots_cert,
        "--key": settings.bots_key,
    }
    keys = [f"{option}={file}" for option, file in files.items() if file is not None]
    text = base64.b64encode(wanted.action).decode()
    return [RUN_ACTION, str(wanted.digest), f"--cas={address}", *keys, *mounts, f"--action={text}"]


def reserved(normal: dict[str, Any], wanted: Runnable) -> dict[str, Any]:
    """Return a request in normal form with what only the door may say: the property, and the key of the action."""
    named = dict(sorted({**normal["properties"], FARM: [OF_FARM]}.items()))
    key = {"dedup_key": key_of(wanted.digest)} if wanted.cacheable else {}
    return normal | {"properties": named} | key


def key_of(digest: Digest) -> str:
    """Return the deduplication key of the jobs that run this action, if its result may be kept."""
    return f"{ACTION_KEY}{digest}"


def digest_of(payload: Mapping[str, Any]) -> Digest | None:
    """Return the digest of the action that a job claims to run; None if it does not."""
    try:
        program, digest = payload["command"][:2]
        return Digest.parse(digest) if program == RUN_ACTION else None
    except (KeyError, TypeError, ValueError):
        return None


def action_of(payload: Mapping[str, Any]) -> bytes | None:
    """Return the action that a job gives to its runner; None if it does not run `leasehold-action`."""
    try:
        program, *_, last = payload["command"]
        flag, _, text = last.partition("=")
        return base64.b64decode(text, validate=True) if (program, flag) == (RUN_ACTION, "--action") else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def runs(payload: Mapping[str, Any], expected: JobRequest) -> bool:
    """Return whether a job has exactly the payload that the door gives to an action.

    A single word more, such as a variable of the environment, could make the runner do something else.
    """
    return bool(payload == expected.normal()["payload"])


def other_settings(payload: Mapping[str, Any], expected: JobRequest) -> Mapping[str, tuple[str, str]]:
    """Return the settings in which the door that has made a job differs from this one: by name, its values and ours.

    Nothing if the job differs in more than that: then it is not the job of this action.
    """
    ours = expected.normal()["payload"]
    if _without_options(payload) != _without_options(ours):
        return {}
    theirs, own = _options(payload["command"]), _options(ours["command"])
    differing = [name for name in sorted({*theirs, *own}) if theirs.get(name) != own.get(name)]
    if not all(name in SETTINGS for name in differing):
        return {}
    return {SETTINGS[name]: (_told(theirs, name), _told(own, name)) for name in differing}


def _without_options(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """A payload whose command has lost what may differ between doors."""
    command = payload.get("command")
    return {**payload, "command": [*command[:2], *command[-1:]] if isinstance(command, list) else command}


def _options(command: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in command[2:-1]:
        name, _, value = str(word).partition("=")
        found.setdefault(name, []).append(value)
    return found


def _told(options: Mapping[str, Sequence[str]], name: str) -> str:
    return " ".join(options.get(name, ())) or "unset"


def _seconds(action: Any) -> float | None:
    """The time-out of an action, None if it has none. Raises BadInput for a negative one, or of over a year."""
    if not action.HasField("timeout"):
        return None
    seconds: float = action.timeout.seconds + action.timeout.nanos / 1e9
    if seconds < 0:
        raise BadInput("action.timeout", "is negative")
    if seconds > YEAR:
        raise BadInput("action.timeout", f"is more than {YEAR:.0f} seconds")
    return seconds or None
