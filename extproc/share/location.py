"""Connections to the server that holds a pool's keys, which each new one looks up again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.utils import str_if_bytes

from extproc.ground.address import join_address

Node = tuple[str, int]  # host and port
Ask = Callable[[Connection, Node], Awaitable[Node]]


class Server:
    """The server to write to.

    Args:
        nodes: the server itself or, with ``ask``, nodes that know where it is.
        kind: of the text that logs show.
        ask: asks a node over a connection to it.
        connection: class of that connection, with redis-py's ``options``.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        kind: str = "",
        ask: Ask | None = None,
        connection: type[Connection] = Connection,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._nodes = nodes
        self._kind = kind
        self._ask = ask
        self._connection = connection
        self._options = options or {}

    def __str__(self) -> str:
        return self._kind + ",".join(join_address(*node) for node in self._nodes)

    async def find(self) -> Node:
        """Asks all nodes at once, for some may hang, and believes the first that answers."""
        if self._ask is None:
            return self._nodes[0]
        problems = []
        tasks = [asyncio.ensure_future(self._found_by(self._ask, node)) for node in self._nodes]
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

    async def _found_by(self, ask: Ask, node: Node) -> Node:
        host, port = node
        connection = self._connection(host=host, port=port, **self._options)
        try:
            return await ask(connection, node)
        finally:
            await connection.disconnect(nowait=True)  # at once, however often this is cancelled


def ask_sentinel(service: str) -> Ask:
    """Returns the question for the primary of a service: Sentinels promote another one."""

    async def ask(connection: Connection, node: Node) -> Node:
        await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
        answer: Any = await connection.read_response()
        if answer is None:
            where = join_address(*node)
            raise RedisConnectionError(f"sentinel {where} knows no service {service!r}")
        host, port = map(str_if_bytes, answer)
        return host, int(port)

    return ask


def ask_cluster(key: str) -> Ask:
    """Returns the question for the node of a Redis Cluster that serves the hash slot of ``key``.

    All keys of a pool are in one slot. So a plain connection to that node can do everything:
    pipelines, transactions, scripts, scans and pub/sub included.
    """

    async def ask(connection: Connection, node: Node) -> Node:
        try:
            await connection.send_command("EXISTS", key)
            await connection.read_response()
        except MovedError as moved:
            return moved.host or node[0], moved.port  # no host: the same one
        return node

    return ask


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
        try:
            return await super().read_response(*args, **options)
        except (ReadOnlyError, MovedError, ClusterDownError) as error:
            await self.disconnect(nowait=True)
            where = join_address(self.host, self.port)
            raise RedisConnectionError(f"{where} is not the one to write to") from error


class LocatedTlsConnection(LocatedConnection, SSLConnection):
    """A connection over TLS that ends like :class:`LocatedConnection`."""
