"""The poller inside a router that is the only one: nothing is shared, so nothing needs Redis."""

from collections.abc import Collection
from random import Random

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.poll.destination import Destination
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.poller import Poller
from extproc.poll.scrape_metrics import PollMetrics
from extproc.replica_state import ReplicaState
from extproc.share.leases import Held


class IntoFleet(Destination):
    """Takes what is seen straight into the router's fleet."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    def put(self, state: ReplicaState) -> None:
        """The fleet knows it at once."""
        self._fleet.put(state)

    def remove(self, replica: str) -> None:
        """The replica left the pool."""
        self._fleet.remove(replica)

    async def share(self, replicas: Collection[str]) -> Held:
        """All of them. The fleet knows them when each was scraped, or could not be."""
        if replicas and all(replica in self._fleet.members for replica in replicas):
            self._fleet.known.set()
        return await super().share(replicas)

    def changed(self, replica: str, blocks: KvBlocks) -> None:
        """The fleet knows it at once."""
        if told := blocks.news():
            self._fleet.blocks.hear(replica, told[0])


async def poll_into(fleet: Fleet, config: Config, metrics: PollMetrics) -> None:
    """Scrape the configured replicas into ``fleet`` for ever."""
    await Poller(config, IntoFleet(fleet), metrics, Random()).run()
