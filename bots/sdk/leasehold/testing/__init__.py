"""What the tests of a program take of this library: a pool of its own for them, started by `leasehold up`.

It may import the whole library. A test suite asks for its fixture by `pytest_plugins = ["leasehold.testing"]` in its
`conftest.py`. Read first: running.py.
"""

from leasehold.testing.running import leasehold_pool, running_pool

__all__ = ["leasehold_pool", "running_pool"]
