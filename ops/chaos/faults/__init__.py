"""The faults by name. It may import everything of `ops.chaos` but the runner. Read first: `fault` and `kills`.

A new fault is a class in one of these modules and an entry in its list.
"""

from collections.abc import Mapping

from ops.chaos.faults.clocks import CLOCKS
from ops.chaos.faults.database import DATABASE
from ops.chaos.faults.fault import Fault
from ops.chaos.faults.kills import KILLS
from ops.chaos.faults.network import NETWORK
from ops.chaos.faults.stops import STOPS
from ops.chaos.faults.versions import VERSIONS

#: Every fault by its name.
FAULTS: Mapping[str, type[Fault]] = {
    fault.name: fault for fault in (*KILLS, *STOPS, *DATABASE, *NETWORK, *CLOCKS, *VERSIONS)
}
