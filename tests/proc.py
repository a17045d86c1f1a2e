"""What tests that look at the kernel's list of processes need."""

import sys

import pytest

#: A module's `pytestmark`.
NEEDS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="process trees are watched through /proc")
