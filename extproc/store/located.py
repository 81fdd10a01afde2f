"""Connections that ask where the server is, each time they connect."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import ClusterDownError, MovedError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from extproc.address import join_address
from extproc.redis_url import Node, Options


class Locate(Protocol):
    """Knows, or finds out, where the server is; in words it says what logs may show."""

    async def __call__(self) -> Node:
        """Where it is now.

        Raises:
            RedisError: nobody tells.
        """


class Fixed:
    """The server is where the URL says."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __str__(self) -> str:
        return join_address(*self._node)

    async def __call__(self) -> Node:
        """The same each time."""
        return self._node


class LocatedConnection(Connection):
    """A connection that ends when the server says it is no longer the one to write to.

    Whoever uses it tries again, as after any lost connection, and so finds the new one.
    """

    def __init__(self, *, locate: Locate, **options: Any) -> None:
        self._locate = locate
        super().__init__(**options)

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self.host, self.port = await self._locate()
        await super()._connect()  # type: ignore[no-untyped-call]

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


async def ask(node: Node, tls: bool, options: Options, *command: str) -> Any:
    """Connect to a node, send it one command, and return what it replies, as redis-py reads it.

    Raises:
        RedisError: it refuses, or cannot be reached.
    """
    host, port = node
    connection = (SSLConnection if tls else Connection)(host=host, port=port, **options)
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_command(*command)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)  # at once, however often this is cancelled


async def first_answer(nodes: Iterable[Node], find: Callable[[Node], Awaitable[Node]]) -> Node:
    """Ask all nodes at once and return what the first of them answers: some may hang.

    Raises:
        RedisConnectionError: none answers.
    """
    problems = []
    tasks = [asyncio.ensure_future(find(node)) for node in nodes]
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
