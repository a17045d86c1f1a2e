"""What workers run: the digest of the action of each lease, with the action in the storage for them to fetch."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from bots.farm.execution import actions
from bots.farm.storage.upstream import Digest, Upstream
from bots.gateway.workers import WorkerPool
from bots.sync.leases import read_payloads

#: Leases whose actions are remembered. A worker is told of an action several times.
REMEMBERED = 20_000

Key = tuple[int, int]


class Payloads:
    """The actions of leases. A door remembers them; after a restart it reads them again."""

    def __init__(self, upstream: Upstream, workers: WorkerPool) -> None:
        self._upstream, self._workers = upstream, workers
        self._known: OrderedDict[Key, Digest] = OrderedDict()

    async def digests(self, leases: Sequence[Any]) -> dict[Key, Digest]:
        """Return the digests of the actions of live leases, by job and fence. Leases that run no action have none.

        Runners need some actions changed, which clients do not know: those are stored first. Raises Missing,
        grpc.aio.AioRpcError if the storage cannot take them.
        """
        keys = [(lease.job_id, lease.fence) for lease in leases]
        found = {key: self._known[key] for key in keys if key in self._known}
        payloads = {
            (lease.job_id, lease.fence): json.loads(lease.payload) for lease in leases if lease.payload is not None
        }
        if unknown := [key for key in keys if key not in found and key not in payloads]:
            payloads |= await self._workers.run(partial(read_payloads, leases=unknown))
        for key, payload in payloads.items():
            if key not in found and (digest := await self._stored(payload)) is not None:
                found[key] = self._known[key] = digest
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found

    async def _stored(self, payload: Any) -> Digest | None:
        """Return the digest of the action that a job gives to its runner, once the storage has it."""
        action = actions.action_of(payload)
        if action is None:
            return None
        digest = Digest.of(action)
        if digest != actions.digest_of(payload):
            await self._upstream.write(action)
        return digest
