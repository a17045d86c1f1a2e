"""What the tests of a program take of this library: `inline`, tasks in the test's own process, and a pool of its own.

It may import the whole library. A test suite asks for its fixtures by `pytest_plugins = ["leasehold.testing"]` in its
`conftest.py`. Read first: inline_jobs.py, running.py.

Each name is imported when it is first used: `inline` starts in milliseconds, and needs no pytest.

pytest need not rewrite assertions here, for there are none, and warns otherwise where a program has imported this
before its plugins: PYTEST_DONT_REWRITE.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leasehold.testing.fixtures import leasehold_inline as leasehold_inline
    from leasehold.testing.fixtures import leasehold_pool as leasehold_pool
    from leasehold.testing.inline_job import InlineJob as InlineJob
    from leasehold.testing.inline_jobs import InlineJobs as InlineJobs
    from leasehold.testing.inline_jobs import inline as inline
    from leasehold.testing.running import running_pool as running_pool

_MODULES = {
    **dict.fromkeys(("leasehold_inline", "leasehold_pool"), "fixtures"),
    "InlineJob": "inline_job",
    **dict.fromkeys(("InlineJobs", "inline"), "inline_jobs"),
    "running_pool": "running",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    # pytest looks for fixtures among these names.
    return sorted({*globals(), *_MODULES})
