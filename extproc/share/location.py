"""Connections to the server that holds a pool's keys; each new one looks up the server again."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redis.asyncio.connection import Connection, RedisSSLContext, SSLConnection
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.utils import str_if_bytes

from extproc.ground.address import is_ip, join_address
from extproc.ground.files import WatchedFiles
from extproc.ground.runtime import look_up, started

Node = tuple[str, int]  # host and port
Ask = Callable[[Connection, Node], Awaitable[Node]]

_TLS_FILES = "ca_certs", "certfile", "keyfile"
_TLS_OPTIONS = *_TLS_FILES, "cert_reqs", "check_hostname", "ciphers"


@dataclass(eq=False, repr=False)  # a connection has a password
class Server:
    """Server that accepts writes, and how to find it."""

    nodes: Sequence[Node]  # the server itself or, with ``ask``, nodes that know its address
    kind: str = ""  # kind of the nodes, for logs
    ask: Ask | None = None  # asks a node, over a connection, for the server's address
    connection: Callable[..., Connection] = Connection  # makes a connection to a node

    def __str__(self) -> str:
        return self.kind + ",".join(join_address(*node) for node in self.nodes)

    async def find(self) -> Node:
        """Asks all nodes for the server; the first answer counts, because some may hang."""
        if self.ask is None:
            return self.nodes[0]
        problems = []
        async with started(*(self._found_by(self.ask, node) for node in self.nodes)) as answers:
            for answer in asyncio.as_completed(answers):
                try:
                    return await answer
                except (RedisError, OSError) as error:
                    problems.append(str(error))
        raise RedisConnectionError("; ".join(dict.fromkeys(problems)))

    async def _found_by(self, ask: Ask, node: Node) -> Node:
        host, port = node
        await _resolve(host)
        connection = self.connection(host=host, port=port)
        try:
            return await ask(connection, node)
        finally:
            await connection.disconnect(nowait=True)  # nothing could interrupt the wait


async def ask_sentinel(service: str, connection: Connection, node: Node) -> Node:
    """Asks a Sentinel for the address of a service's primary."""
    await connection.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
    answer: Any = await connection.read_response()
    if answer is None:
        raise RedisConnectionError(f"sentinel {join_address(*node)} knows no service {service!r}")
    host, port = map(str_if_bytes, answer)
    return host, int(port)


async def ask_cluster(key: str, connection: Connection, node: Node) -> Node:
    """Asks a Cluster node which node serves the hash slot of ``key``.

    All keys of a pool are in one slot. So a plain connection to that node supports pipelines,
    transactions, scripts, scans and pub/sub.
    """
    try:
        await connection.send_command("EXISTS", key)
        await connection.read_response()
    except MovedError as moved:
        return moved.host or node[0], moved.port  # empty host: the same host
    return node


async def _resolve(host: str) -> None:
    """Looks up a name before the connection does, so that an unknown name fails here.

    If a time limit ended the connection's own lookup, uvloop would later log the lookup's failure,
    which nobody awaits any more.
    """
    if not is_ip(host):
        try:
            await look_up(host)
        except (OSError, UnicodeError) as error:
            raise RedisConnectionError(f"{host} does not resolve: {error}") from None


class TlsConnection(SSLConnection):
    """Connection over TLS. Equal options share a context, which takes 20 ms of the event loop to
    make. A changed file makes a new context, unlike in redis-py; an unusable file keeps the last.
    """

    def _connection_arguments(self) -> Mapping[str, Any]:
        tls = self.ssl_context
        tls.context = _watched(**{name: getattr(tls, name) for name in _TLS_OPTIONS}).newest()
        return super()._connection_arguments()


@cache
def _watched(**options: Any) -> WatchedFiles[ssl.SSLContext]:
    files = [Path(options[name]) for name in _TLS_FILES if options[name]]
    return WatchedFiles("TLS files of Redis", lambda: RedisSSLContext(**options).get(), *files)


class LocatedConnection(Connection):
    """Connection that ends when the server no longer accepts writes.

    Callers retry, as after any lost connection, and so find the new server.
    """

    def __init__(self, *, server: Server, **options: Any) -> None:
        self._server = server
        super().__init__(**options)

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self.host, self.port = await self._server.find()
            await _resolve(self.host)
        connect: Any = super()._connect  # redis-py leaves the method untyped
        await connect()

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except AuthenticationError as error:  # Redis's own text may only name its commands
            text = "login refused (redis.password, or user and password in redis.url)"
            raise AuthenticationError(f"{text}: {error}") from error
        except (ReadOnlyError, MovedError, ClusterDownError) as error:
            await self.disconnect(nowait=True)
            why = "no longer accepts writes"
            if isinstance(error, MovedError) and self._server.ask is None:
                why = "leaves the pool's keys to another node of a Redis Cluster: set redis.cluster"
            where = join_address(self.host, self.port)
            raise RedisConnectionError(f"{where} {why}") from error


class LocatedTlsConnection(LocatedConnection, TlsConnection):
    """Connection over TLS that ends when the server no longer accepts writes."""
