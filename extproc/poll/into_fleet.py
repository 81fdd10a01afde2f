"""The poller inside a router that is the only one: nothing is shared, so nothing needs Redis."""

from collections.abc import Callable, Collection
from random import Random

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.held_blocks import HeldBlocks
from extproc.poll.discovery import names_replicas
from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.poller import Poller
from extproc.poll.scrape_metrics import PollMetrics
from extproc.replica_state import ReplicaState
from extproc.store.leases import Held


class StatesIntoFleet:
    """Takes what is seen of replicas straight into the router's fleet: they are all this one
    poller's."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.put = fleet.put
        self.remove = fleet.remove

    def forget(self, replica: str) -> None:
        """No other poller takes anything."""

    async def tend(self, replicas: Collection[str]) -> Held:
        """All of them. The fleet knows them when each was scraped, or could not be."""
        if replicas and all(replica in self._fleet.members for replica in replicas):
            self._fleet.known.set()
        return Held(frozenset(replicas))

    async def release(self) -> None:
        """There is nobody to take them."""


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


def check_some(config: Config) -> None:
    """Look whether there is anything to poll.

    Raises:
        ValueError: the configuration names no replicas.
    """
    if not names_replicas(config):
        raise ValueError("no replicas to poll: configure 'replicas' or 'replicas_file'")


async def _nothing(_: Collection[str]) -> dict[str, ReplicaState]:
    return {}


async def poll_into(fleet: Fleet, config: Config, metrics: PollMetrics) -> None:
    """Scrape the configured replicas into ``fleet`` for ever."""
    states, blocks = StatesIntoFleet(fleet), BlocksIntoFleet(fleet.blocks)
    await Poller(config, metrics, states, states, _nothing, Random(), blocks).run()
