"""The poller inside a router that is the only one: nothing is shared, so nothing needs Redis."""

from collections.abc import Callable, Collection
from random import Random

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.held_blocks import HeldBlocks
from extproc.poll.app import polling
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.metrics import PollMetrics
from extproc.replica_state import ReplicaState
from extproc.store.leases import Held


class IntoFleet:
    """Takes what the watches see straight into the router's fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def put(self, state: ReplicaState) -> None:
        """The fleet knows it at once."""
        self._fleet.put(state)

    def put_again(self, replica_id: str) -> None:
        """A fleet forgets nothing."""

    def forget(self, replica_id: str) -> None:
        """No other poller takes anything."""

    def remove(self, replica_id: str) -> None:
        """The replica left the pool."""
        self._fleet.remove(replica_id)

    async def run(self) -> None:
        """There is nothing to do later."""


class BlocksIntoFleet:
    """Takes what is known of KV blocks straight into the router's fleet."""

    def __init__(self, blocks: HeldBlocks) -> None:
        self._blocks = blocks

    def changed(self, replica: str, blocks: KvBlocks) -> None:
        """The fleet knows it at once."""
        if told := blocks.news():
            self._blocks.hear(replica, told[0])

    async def load(self, replica: str) -> bytes:
        """No other poller was there before."""
        return b""

    async def save(self, replica: str, dump: Callable[[], bytes]) -> None:
        """No other poller comes."""


class Everything:
    """All replicas are this one poller's, and nobody knew them before."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def tend(self, replicas: Collection[str]) -> Held:
        """All of them. The fleet knows them when each was scraped, or could not be."""
        if replicas and all(replica in self._fleet.members for replica in replicas):
            self._fleet.known.set()
        return Held(frozenset(replicas))

    async def release(self) -> None:
        """There is nobody to take them."""


async def _nothing(_: Collection[str]) -> dict[str, ReplicaState]:
    return {}


async def poll_into(fleet: Fleet, config: Config, metrics: PollMetrics) -> None:
    """Scrape the configured replicas into ``fleet`` for ever."""
    parts = IntoFleet(fleet), Everything(fleet), _nothing, Random(), BlocksIntoFleet(fleet.blocks)
    async with polling(config, metrics, *parts) as poller:
        await poller.run()
