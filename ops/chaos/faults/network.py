"""Faults of the network, made by the proxies between the parts of the pool."""

from collections.abc import Sequence

from ops.chaos.faults.fault import Fault
from ops.chaos.proxy import Link


class NetworkFault(Fault):
    """Hits one or more links."""

    holds = (0.3, 3.0)
    hit: Sequence[Link] = ()

    def inject(self) -> None:
        self.target = self.choose()
        self.hit = [self.pool.links[self.target]]
        for link in self.hit:
            self.disturb(link)

    def heal(self) -> None:
        for link in self.hit:
            link.heal()

    def choose(self) -> str:
        return self.chance.choice(list(self.pool.links))

    def disturb(self, link: Link) -> None:
        raise NotImplementedError


class Partition(NetworkFault):
    """Nothing passes in either direction; what was sent arrives when the partition is over."""

    name = "partition"

    def disturb(self, link: Link) -> None:
        link.hold()


class LongBotPartition(Partition):
    """Cuts a bot off until its session has expired and its jobs run elsewhere."""

    name = "partition-bot-past-session"
    holds = (7.0, 8.0)

    def choose(self) -> str:
        return self.a_busy_bot()[0].name


class LostRequests(NetworkFault):
    """Requests arrive late, answers pass."""

    name = "lose-requests"

    def disturb(self, link: Link) -> None:
        link.hold(from_target=False)


class LostAnswers(NetworkFault):
    """Requests arrive and take effect, but nobody hears the answer in time."""

    name = "lose-answers"

    def disturb(self, link: Link) -> None:
        link.hold(to_target=False)


class Cut(NetworkFault):
    """Every connection is reset, and no new one is made."""

    name = "cut"

    def disturb(self, link: Link) -> None:
        link.cut()


class HalfOpenTarget(NetworkFault):
    """The client is gone and the server does not notice: its connections, transactions and locks stay."""

    name = "half-open-server"
    holds = (0.3, 2.0)

    def disturb(self, link: Link) -> None:
        link.strand(target=True)


class HalfOpenClient(NetworkFault):
    """The server is gone and the client does not notice: it waits for an answer that never comes."""

    name = "half-open-client"
    holds = (0.3, 2.0)

    def disturb(self, link: Link) -> None:
        link.strand(target=False)


class WholePartition(Partition):
    """Cuts every bot off at the same moment."""

    name = "partition-all-bots"

    def inject(self) -> None:
        self.hit = [link for name, link in self.pool.links.items() if name.startswith("bot-")]
        for link in self.hit:
            self.disturb(link)


NETWORK = (
    Partition,
    LongBotPartition,
    WholePartition,
    LostRequests,
    LostAnswers,
    Cut,
    HalfOpenTarget,
    HalfOpenClient,
)
