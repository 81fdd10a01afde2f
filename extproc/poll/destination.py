"""Destinations of a poller's results; a destination also assigns replicas to the poller."""

from collections.abc import Callable, Collection, Mapping

from extproc.fleet.fleet import Fleet
from extproc.ground.runtime import in_turns
from extproc.poll.kv_blocks import KvBlocks
from extproc.replica_state import ReplicaState
from extproc.share.assignment import Assignment
from extproc.share.drains import Drains


class Destination:
    """Receives states and KV blocks of replicas.

    This base class drops what it receives, and assigns all replicas to its only poller.
    """

    def __init__(self) -> None:
        self.drains = Drains()

    def put(self, state: ReplicaState) -> None:
        """Publishes the newest state of a replica."""

    def remove(self, replica: str) -> None:
        """Deletes the state of a replica that left the pool."""

    def forget(self, replica: str) -> None:
        """Stops writing the replica's state, but keeps it: another poller took the replica over."""

    async def claim(self, replicas: Collection[str], problems: Collection[str] = ()) -> Assignment:
        """Returns the subset of the replicas that this poller has to scrape until the next call.

        ``problems``: sources of replicas that cannot be read, each with the reason.
        """
        return Assignment(frozenset(replicas))

    async def last_states(self, replicas: Collection[str]) -> Mapping[str, ReplicaState]:
        """Returns the last state that any poller wrote for each of these replicas, if any."""
        return {}

    async def blocks_changed(self, replica: str, blocks: KvBlocks) -> None:
        """Notes that the replica's KV blocks may have changed."""

    async def save_blocks(self, replica: str, dump: Callable[[], bytes]) -> bool:
        """Stores ``dump()`` for the replica's next poller. Returns False, without a wait, if too
        many saves and loads are in progress: the caller tries again later."""
        return True

    async def load_blocks(self, replica: str) -> bytes:
        """Returns the last bytes saved for the replica, or empty bytes if nothing was saved."""
        return b""


class IntoFleet(Destination):
    """Puts states and KV blocks directly into the fleet of a router that runs without Redis."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    def put(self, state: ReplicaState) -> None:
        self._fleet.put(state)

    def remove(self, replica: str) -> None:
        self._fleet.remove(replica)

    async def claim(self, replicas: Collection[str], problems: Collection[str] = ()) -> Assignment:
        self._fleet.listed(replicas)
        self._fleet.pollers = {"in this router": (*problems,)}
        return await super().claim(replicas)

    async def blocks_changed(self, replica: str, blocks: KvBlocks) -> None:
        if update := blocks.next_update():
            if self._fleet.blocks.follows(replica, update[0]):
                await in_turns(self._fleet.blocks.apply(replica, update[0]))
            else:  # the fleet forgot the blocks while the replica was no member
                blocks.resend_all()
