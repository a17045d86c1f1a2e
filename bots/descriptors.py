"""Room for the open files of many commands: pipes and sockets of the agent's own, some for each."""

import resource

from schema.errors import BadInput

#: Of one command, while it is being started: its pipe, its control socket, its bell and its standard input.
_EACH = 8
#: Of the agent itself: modules, locks, the gateway.
_OWN = 128


def make_room(commands: int) -> int:
    """Raise the soft limit of open files so far that this process can run so many commands side by side.

    Returns the limit as it was. Raises BadInput where the hard limit is too low.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _OWN + _EACH * commands
    if before != resource.RLIM_INFINITY and before < need:
        if most != resource.RLIM_INFINITY and most < need:
            raise BadInput(
                "capacity", f"{commands} needs {need} open files, and the hard limit (RLIMIT_NOFILE) is {most}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, most))
    return before
