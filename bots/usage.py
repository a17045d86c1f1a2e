"""What a command says it has used, in whatever units: a JSON object in the file that LEASEHOLD_USAGE names."""

import os
import stat
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bots.protocol import Usage
from schema.errors import BadInput
from schema.limits import parse_json

#: In the command's directory; it is not there before the command writes it.
FILE = ".leasehold-usage"
#: Bytes that are read of it, and those that may be told: the ends of 10,000 leases have to fit into one call.
MAX_BYTES, MAX_TOLD_BYTES = 4096, 200

_USAGE: TypeAdapter[Usage] = TypeAdapter(Usage)


def read(path: Path) -> Usage | None:
    """What was written there, None if nothing was. Raises BadInput for what says no amounts by unit.

    Nothing is followed or waited for: the command may have made of the path whatever it likes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise BadInput("usage", "is no file")
            raw = os.read(descriptor, MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput("usage", f"cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise BadInput("usage", f"is larger than {MAX_BYTES} bytes")
    try:
        found = _USAGE.validate_python(parse_json(raw, "usage")) if raw.strip() else None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise BadInput("usage", f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"[:300]) from None
    if found is not None and len(_USAGE.dump_json(found)) > MAX_TOLD_BYTES:
        raise BadInput("usage", f"says more than {MAX_TOLD_BYTES} bytes")
    return found
