"""Where a poller brings what it sees of replicas, and whom it shares them with."""

from collections.abc import Callable, Collection, Mapping

from extproc.poll.kv_blocks import KvBlocks
from extproc.poll.membership import Membership
from extproc.replica_state import ReplicaState
from extproc.share.leases import Held


class Destination:
    """What a poller works for. This one takes nothing, and knows of no other poller."""

    def __init__(self) -> None:
        self.membership = Membership()
        """What commands asked for."""

    def put(self, state: ReplicaState) -> None:
        """A replica's newest state."""

    def remove(self, replica: str) -> None:
        """The replica left the pool."""

    def forget(self, replica: str) -> None:
        """Another poller has the replica now, or is to: nothing more is said of it."""

    async def share(self, replicas: Collection[str]) -> Held:
        """The part of these replicas that is this poller's until the next call."""
        return Held(frozenset(replicas))

    async def release(self) -> None:
        """Give up everything."""

    async def known(self, replicas: Collection[str]) -> Mapping[str, ReplicaState]:
        """What the pollers before saw of these replicas, by id, as far as anybody knows."""
        return {}

    def changed(self, replica: str, blocks: KvBlocks) -> None:
        """There may be news of the replica's KV blocks."""

    async def save(self, replica: str, dump: Callable[[], bytes]) -> None:
        """Keep what ``dump`` gives of its blocks for the next poller, where there can be one."""

    async def load(self, replica: str) -> bytes:
        """What was saved last, by whichever poller; empty: nothing is to be had."""
        return b""
