"""Takers of what a poller sees of replicas; they also divide replicas among pollers."""

from collections.abc import Callable, Collection, Mapping

from extproc.fleet.fleet import Fleet
from extproc.ground.runtime import in_turns
from extproc.poll.kv_blocks import KvBlocks
from extproc.replica_state import ReplicaState
from extproc.share.assignment import Assignment
from extproc.share.drains import Drains


class Destination:
    """Takes what a poller sees and divides replicas among pollers; this base class drops all and
    shares nothing."""

    def __init__(self) -> None:
        self.drains = Drains()

    def put(self, state: ReplicaState) -> None:
        """Takes a replica's newest state."""

    def remove(self, replica: str) -> None:
        """The replica left the pool."""

    def forget(self, replica: str) -> None:
        """Another poller has the replica now, or is to: nothing more is said of it."""

    async def share(self, replicas: Collection[str]) -> Assignment:
        """Returns the part of these replicas that is this poller's until the next call."""
        return Assignment(frozenset(replicas))

    async def release(self) -> None:
        """Gives up all replicas."""

    async def known(self, replicas: Collection[str]) -> Mapping[str, ReplicaState]:
        """Returns the last states that any poller wrote, by replica; those unknown are missing."""
        return {}

    async def changed(self, replica: str, blocks: KvBlocks) -> None:
        """The replica's KV blocks may have changed."""

    async def save(self, replica: str, dump: Callable[[], bytes]) -> None:
        """Keeps what ``dump`` gives of its blocks for the next poller, where there can be one."""

    async def load(self, replica: str) -> bytes:
        """Returns what any poller saved last; empty: nothing."""
        return b""


class IntoFleet(Destination):
    """Brings what is seen straight into the fleet of the only router: nothing needs Redis."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    def put(self, state: ReplicaState) -> None:
        self._fleet.put(state)

    def remove(self, replica: str) -> None:
        self._fleet.remove(replica)

    async def share(self, replicas: Collection[str]) -> Assignment:
        """Returns all of them; the fleet is known once each was scraped, or could not be."""
        if replicas and all(replica in self._fleet.members for replica in replicas):
            self._fleet.members_known.set()
        return await super().share(replicas)

    async def changed(self, replica: str, blocks: KvBlocks) -> None:
        if (told := blocks.news()) and self._fleet.blocks.follows(replica, told[0]):
            await in_turns(self._fleet.blocks.apply(replica, told[0]))
