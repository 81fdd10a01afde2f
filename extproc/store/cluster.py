"""The node of a Redis Cluster that holds a pool.

All keys of a pool have the same hash tag, so that one node holds them all. A plain connection to
that node can do everything, pipelines, transactions, scripts, scans and pub/sub included.
"""

from collections.abc import Sequence

from redis.exceptions import MovedError

from extproc.address import join_address
from extproc.redis_url import Node, Options
from extproc.store.keys import slot_key
from extproc.store.located import ask, first_answer


class Owner:
    """Finds the node that now serves a pool's hash slot."""

    def __init__(self, pool: str, nodes: Sequence[Node], tls: bool, options: Options) -> None:
        """
        Args:
            pool: whose keys are wanted.
            nodes: some nodes of the Cluster; the first that answers is believed.
            tls: whether they speak TLS.
            options: redis-py's options of a connection to them.
        """
        self._key = slot_key(pool)
        self._nodes = nodes
        self._tls = tls
        self._options = dict(options)

    def __str__(self) -> str:
        return f"cluster {','.join(join_address(*node) for node in self._nodes)}"

    async def __call__(self) -> Node:
        """Ask the nodes.

        Raises:
            RedisConnectionError: none of them answers, or the Cluster is down.
        """
        return await first_answer(self._nodes, self._ask)

    async def _ask(self, node: Node) -> Node:
        """Ask for a key of the pool: a node that does not serve its slot says which one does."""
        try:
            await ask(node, self._tls, self._options, "EXISTS", self._key)
        except MovedError as moved:
            return moved.host or node[0], moved.port  # no host: the same one
        return node
