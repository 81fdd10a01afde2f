"""The poller inside a router that is the only one: nothing is shared, so nothing needs Redis."""

from random import Random

from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.fleet.state import ReplicaState
from extproc.poll.app import polling
from extproc.poll.metrics import PollMetrics


class IntoFleet:
    """Takes what the watches see straight into the router's fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def put(self, state: ReplicaState) -> None:
        """The fleet knows it at once."""
        self._fleet.put(state)

    def remove(self, replica_id: str) -> None:
        """The replica left the pool."""
        self._fleet.remove(replica_id)

    async def run(self) -> None:
        """There is nothing to do later."""


async def poll_into(fleet: Fleet, config: Config, metrics: PollMetrics) -> None:
    """Scrape the configured replicas into ``fleet`` for ever."""
    async with polling(config, metrics, IntoFleet(fleet), Random()) as poller:
        await poller.run()
