"""Redis with Sentinels, as a Cluster, and behind TLS."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from extproc.config import Config, RedisSettings
from extproc.ground.runtime import started
from extproc.lab.harness.processes import Process, flags, free_port, listening, redis_binary
from extproc.poll.into_redis import IntoRedis
from extproc.share.assignment import Assigner
from extproc.share.connection import connect
from tests.waiting import until

HOST = "127.0.0.1"


async def start(directory: Path, port: int, options: Mapping[str, str]) -> Process:
    usual = {"port": str(port), "bind": HOST, "save": "", "appendonly": "no", "dir": str(directory)}
    usual["repl-diskless-sync-delay"] = "0"  # else a primary waits 5 s for more replicas
    log = directory / f"{port}.log"
    return await Process.start(
        f"redis {port}",
        [redis_binary(), *flags({**usual, **options})],
        log=log,
        ready=listening(port),
    )


class SentinelPair:
    """Primary and replica, watched by a Sentinel with a password.

    Its user ``USER`` has the rights that docs/operations/secure.md lists.
    """

    SERVICE = "main"
    USER = "router"
    PASSWORD = "of-sentinels"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ports = [free_port(), free_port()]
        self.sentinel_port = free_port()
        self.servers: list[Process] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for port in self.ports:
            server = await start(self._directory, port, {})
            self.servers.append(await stack.enter_async_context(server))
        async with Redis(port=self.ports[1]) as replica:
            await command(replica, "REPLICAOF", HOST, self.ports[0])
            await stack.enter_async_context(await self._start_sentinel())
            await until(partial(replication_is, replica, "master_link_status", "up"))
        async with Redis(port=self.sentinel_port, password=self.PASSWORD) as sentinel:
            # A Sentinel that was stopped for 2 s, on a busy machine, pauses for half a minute.
            with suppress(ResponseError):  # Redis 6.2 has no such setting
                await command(sentinel, "SENTINEL", "DEBUG", "TILT-TRIGGER", 600_000)
            await until(partial(self._could_take_over, sentinel))

    async def _could_take_over(self, sentinel: Redis) -> bool:
        """Returns True if the Sentinel knows the replica, and has its state."""
        replicas = await sentinel.sentinel_slaves(self.SERVICE)
        return any(replica["master-link-status"] == "ok" for replica in replicas)

    async def _start_sentinel(self) -> Process:
        file = self._directory / "sentinel.conf"
        name, port = self.SERVICE, self.ports[0]
        file.write_text(
            f'port {self.sentinel_port}\nbind {HOST}\nrequirepass "{self.PASSWORD}"\n'
            f"dir {self._directory}\nsentinel monitor {name} {HOST} {port} 1\n"
            f"sentinel down-after-milliseconds {name} 3000\n"
            f"sentinel failover-timeout {name} 2000\n"
            f"user {self.USER} on >{self.PASSWORD} +sentinel|get-master-addr-by-name +@connection\n"
        )
        return await Process.start(
            "sentinel",
            [redis_binary(), file, "--sentinel"],
            log=self._directory / "sentinel.log",
            ready=listening(self.sentinel_port),
        )


class RedisCluster:
    """Three primaries and a replica of the first, which holds all slots but two.

    Each server has a second port, 10,000 higher: ``free_port`` leaves room for it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ports = [free_port() for _ in range(4)]
        self.nodes: list[Process] = []

    async def start(self, stack: AsyncExitStack) -> None:
        for port in self.ports:
            options = {
                "cluster-enabled": "yes",
                "cluster-config-file": f"nodes-{port}.conf",
                "cluster-node-timeout": "1000",
            }
            node = await start(self._directory, port, options)
            self.nodes.append(await stack.enter_async_context(node))
        clients = [await stack.enter_async_context(Redis(port=port)) for port in self.ports]
        for client, slots in zip(clients, (range(16382), [16382], [16383]), strict=False):
            await command(client, "CLUSTER", "ADDSLOTS", *slots)
        for epoch, client in enumerate(clients, start=1):
            await command(client, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for client in clients[1:]:
            await command(client, "CLUSTER", "MEET", HOST, self.ports[0])
        first = str(await command(clients[0], "CLUSTER", "MYID"), "ascii")
        for client in clients:
            await until(partial(_cluster_is, client, "cluster_known_nodes", "4"))
        await command(clients[3], "CLUSTER", "REPLICATE", first)
        await until(partial(replication_is, clients[3], "master_link_status", "up"))
        for client in clients:
            await until(partial(_cluster_is, client, "cluster_state", "ok"))
        await self.miss_after(60.0)

    async def miss_after(self, seconds: float) -> None:
        """Sets the seconds after which a silent node counts as failed."""
        for port in self.ports:
            async with Redis(port=port) as client:
                await client.config_set("cluster-node-timeout", round(seconds * 1000))


Servers = TypeVar("Servers", SentinelPair, RedisCluster)


@asynccontextmanager
async def running(servers: Servers) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        await servers.start(stack)
        yield servers


async def command(client: Redis, *words: str | int) -> Any:
    execute: Any = client.execute_command  # redis-py leaves the method untyped
    return await execute(*words)


async def fill(client: Redis) -> None:
    """Make a Redis refuse writes that take memory."""
    await client.config_set("maxmemory", 1)


async def stop_saving(client: Redis) -> None:
    """Make a Redis refuse writes and PING (MISCONF), because it cannot save its data to disk."""
    await client.config_set("save", "3600 1")
    shutil.rmtree(str((await client.config_get("dir"))["dir"]))
    await client.bgsave()
    await until(partial(_save_failed, client))


Refuse = Callable[[Redis], Awaitable[None]]
each_refusal = pytest.mark.parametrize("refuse", [fill, stop_saving])


async def _save_failed(client: Redis) -> bool:
    return bool((await client.info("persistence"))["rdb_last_bgsave_status"] == "err")


async def replication_is(client: Redis, field: str, value: str) -> bool:
    found: str | None = (await client.info("replication")).get(field)
    return found == value


async def _cluster_is(client: Redis, field: str, value: str) -> bool:
    info: dict[str, str] = await client.cluster("INFO")
    return info.get(field) == value


class Proxy:
    def __init__(self, behind: int) -> None:
        self._behind = behind
        self.port = 0
        self.closed = False  # True: new connections are closed
        self.mute = False  # True: new connections are accepted and get no answer
        self.vanished = False  # True: connections stay open, and nothing is forwarded
        self.unanswered = asyncio.Event()  # set by the first connection without an answer
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closed:
            writer.close()
            return
        self._writers.append(writer)
        if self.mute:
            self.unanswered.set()
            with suppress(OSError):
                await reader.read()
            return
        back_reader, back_writer = await asyncio.open_connection(HOST, self._behind)
        self._writers.append(back_writer)
        await asyncio.gather(self._forward(reader, back_writer), self._forward(back_reader, writer))

    def cut(self) -> None:
        for writer in self._writers:
            with suppress(AttributeError):  # Python 3.11.2: it is closed already
                writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if not self.vanished:
                    writer.write(data)
                    await writer.drain()
        writer.close()


@asynccontextmanager
async def proxied(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Proxy]:
    proxy = Proxy(port)
    server = await asyncio.start_server(proxy.serve, HOST, 0, ssl=context)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()


@asynccontextmanager
async def publishing(url: RedisSettings | str, pool: str = "test") -> AsyncIterator[IntoRedis]:
    """Writes as a poller that sends no heartbeats, but counts as alive."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Assigner, "lapsed", False)
        async with connect(url, pool) as redis:
            publisher = IntoRedis(redis, Config(pool=pool), "")
            async with started(publisher.run()):
                yield publisher
