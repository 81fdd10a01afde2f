"""Where the server that holds a pool's keys is: asked each time a connection is made."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.utils import str_if_bytes

from extproc.ground.address import join_address

Node = tuple[str, int]  # host and port


class Server:
    """The one that the URL names; as text, what logs may show."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes

    def __str__(self) -> str:
        return ",".join(join_address(*node) for node in self._nodes)

    async def find(self) -> Node:
        """Where it is now."""
        return self._nodes[0]


class _Asked(Server, ABC):
    """One that the nodes of the URL know of."""

    def __init__(self, nodes: Sequence[Node], tls: bool, options: dict[str, Any]) -> None:
        """``options``: redis-py's, of a connection to the nodes."""
        super().__init__(nodes)
        self._kind = SSLConnection if tls else Connection
        self._options = options

    async def find(self) -> Node:
        """Ask all nodes at once, for some may hang, and believe the first that answers."""
        problems = []
        tasks = [asyncio.ensure_future(self._ask(node)) for node in self._nodes]
        try:
            for answer in asyncio.as_completed(tasks):
                try:
                    return await answer
                except (RedisError, OSError) as error:
                    problems.append(str(error))
            raise RedisConnectionError("; ".join(dict.fromkeys(problems)))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @abstractmethod
    async def _ask(self, node: Node) -> Node: ...

    async def _send(self, node: Node, *command: str) -> Any:
        host, port = node
        connection = self._kind(host=host, port=port, **self._options)
        try:
            await connection.send_command(*command)  # which connects
            return await connection.read_response()
        finally:
            await connection.disconnect(nowait=True)  # at once, however often this is cancelled


class Primary(_Asked):
    """The present primary of a service: Sentinels promote another when it fails."""

    def __init__(
        self, nodes: Sequence[Node], tls: bool, options: dict[str, Any], service: str
    ) -> None:
        super().__init__(nodes, tls, options)
        self._service = service

    def __str__(self) -> str:
        return f"{self._service} of sentinels {super().__str__()}"

    async def _ask(self, node: Node) -> Node:
        answer = await self._send(node, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        if answer is None:
            where = join_address(*node)
            raise RedisConnectionError(f"sentinel {where} knows no service {self._service!r}")
        host, port = map(str_if_bytes, answer)
        return host, int(port)


class SlotOwner(_Asked):
    """The node of a Redis Cluster that serves a pool's hash slot.

    All keys of a pool are in one slot. So a plain connection to that node can do everything:
    pipelines, transactions, scripts, scans and pub/sub included.
    """

    def __init__(self, nodes: Sequence[Node], tls: bool, options: dict[str, Any], key: str) -> None:
        """``key``: one of the pool's."""
        super().__init__(nodes, tls, options)
        self._key = key

    def __str__(self) -> str:
        return f"cluster {super().__str__()}"

    async def _ask(self, node: Node) -> Node:
        """A node that does not serve the slot says which one does."""
        try:
            await self._send(node, "EXISTS", self._key)
        except MovedError as moved:
            return moved.host or node[0], moved.port  # no host: the same one
        return node


class LocatedConnection(Connection):
    """A connection that ends when the server says it is no longer the one to write to.

    Whoever uses it tries again, as after any lost connection, and so finds the new one.
    """

    def __init__(self, *, server: Server, **options: Any) -> None:
        self._server = server
        super().__init__(**options)

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self.host, self.port = await self._server.find()
        await super()._connect()  # type: ignore[no-untyped-call]  # redis-py leaves it untyped

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """As redis-py's, but a fail-over is a lost connection."""
        try:
            return await super().read_response(*args, **options)
        except (ReadOnlyError, MovedError, ClusterDownError) as error:
            await self.disconnect(nowait=True)
            where = join_address(self.host, self.port)
            raise RedisConnectionError(f"{where} is not the one to write to") from error


class LocatedTlsConnection(LocatedConnection, SSLConnection):
    """The same over TLS."""
