"""Redis over a Unix socket, TLS, Sentinels and a Cluster, with fail-overs."""

import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs
from redis.asyncio import Redis
from redis.exceptions import RedisError

from extproc.config import RedisSettings
from extproc.lab.harness.processes import free_port
from extproc.replica_state import ReplicaState
from extproc.share.connection import connect
from extproc.share.replicas import Put, Removed, Snapshot, StateWriter
from tests.certificates import NEW_KEY, openssl
from tests.conftest import Logged, RedisServer, wait_for_redis
from tests.share.conftest import A, B, Next, lost, reading
from tests.share.servers import (
    HOST,
    RedisCluster,
    SentinelPair,
    command,
    proxied,
    publishing,
    replication_is,
    running,
    start,
)
from tests.waiting import until as eventually

pytestmark = pytest.mark.process

POOL = "test"
UNUSABLE = (
    "TLS files of Redis cannot be used: keeping the last usable content, if any, and retrying"
)


async def share_through(url: RedisSettings | str) -> None:
    async with connect(url, POOL) as redis:
        writer = StateWriter(redis, POOL, ttl_s=60)
        await writer.put([A])
        async with reading(url, POOL) as following:
            assert await following() == Snapshot((A,))
            await writer.put([A, B])
            assert [await following(), await following()] == [Put(A), Put(B)]
            await writer.remove([A.id, B.id])
            assert [await following(), await following()] == [Removed(A.id), Removed(B.id)]


async def until_known(following: Next, state: ReplicaState) -> None:
    """Waits until the state is pushed, or is in a snapshot."""
    while True:
        change = await following()
        if change == Put(state) or (isinstance(change, Snapshot) and state in change.states):
            return


async def written(redis: Redis, key: str) -> bool:
    with suppress(RedisError):
        return bool(await redis.set(key, 1, px=60_000))
    return False


async def test_state_passes_unix_socket(tmp_path: Path) -> None:
    path, port = tmp_path / "redis.sock", free_port()
    async with (
        await start(tmp_path, port, {"unixsocket": str(path)}),
        Redis(host=HOST, port=port) as redis,
    ):
        await redis.ping()  # answered once Redis listens at the socket, too
        await share_through(f"unix://{path}?db=3")


async def test_state_passes_tls(
    redis_server: RedisServer, certificate: Path, logged: Logged
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with proxied(redis_server.port, context) as proxy:
        await share_through(f"rediss://localhost:{proxy.port}/0?ssl_ca_certs={certificate}")
        await share_through(f"rediss://{HOST}:{proxy.port}?ssl_cert_reqs=none")
        line = await lost(f"rediss://localhost:{proxy.port}", logged)
    assert "certificate verify failed" in str(line["error"])


async def test_state_passes_mutual_tls(redis_server: RedisServer, certificate: Path) -> None:
    async with proxied(redis_server.port, mutual_tls(certificate)) as proxy:
        url = f"rediss://localhost:{proxy.port}/0?ssl_ca_certs={certificate}"
        await share_through(f"{url}&ssl_certfile={certificate}")
        async with connect(url, POOL) as redis:
            with pytest.raises(RedisError):
                await redis.ping()


async def test_renewed_certificates_are_used_without_a_restart(
    redis_server: RedisServer, certificate: Path, logged: Logged
) -> None:
    context = mutual_tls(certificate)
    async with proxied(redis_server.port, context) as proxy:
        files = f"ssl_ca_certs={certificate}&ssl_certfile={certificate}"
        async with connect(f"rediss://localhost:{proxy.port}/0?{files}", POOL) as redis:
            await redis.ping()
            os.truncate(certificate, 0)
            proxy.cut()
            await eventually(partial(written, redis, "{test}:key"))
            line = await logged.line(UNUSABLE)
            assert line["file"] == f"{certificate}, {certificate}"
            make_certificate(certificate)
            renewed = mutual_tls(certificate)
            context.sni_callback = lambda server, *_: setattr(server, "context", renewed)
            proxy.cut()
            await eventually(partial(written, redis, "{test}:key"))


async def test_connections_share_a_tls_context(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new context takes 20 ms of the event loop, because it reads the system's authorities."""
    made, make = list[ssl.SSLContext](), ssl.create_default_context

    def counted() -> ssl.SSLContext:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    url, nodes = f"rediss://?ssl_ca_certs={certificate}", cluster_at(free_port(), free_port())
    async with connect(RedisSettings(url=url, cluster=nodes.cluster), POOL) as redis:
        for _ in range(2):
            with pytest.raises(RedisError):
                await redis.ping()
    assert len(made) == 1


async def test_hung_sentinels_delay_no_connection(
    servers: SentinelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_redis(monkeypatch, 1.0)
    with socket.create_server((HOST, 0)) as hung:  # connections are accepted, and no more
        port = hung.getsockname()[1]
        await share_through(sentinels(servers, f"{HOST}:{port}", f"{HOST}:{free_port()}"))


async def test_unknown_sentinel_service_is_named(servers: SentinelPair, logged: Logged) -> None:
    line = await lost(sentinels(servers, service="other"), logged)
    assert "knows no service 'other'" in str(line["error"])
    assert line["redis"] == f"other of sentinels {HOST}:{servers.sentinel_port}"


async def test_sentinel_failover_is_followed(servers: SentinelPair) -> None:
    url = sentinels(servers)
    async with publishing(url) as publisher, reading(url, POOL) as following:
        assert await following() == Snapshot(())
        publisher.put(A)
        await until_known(following, A)
        await servers.servers[0].kill()
        publisher.put(B)
        await until_known(following, B)
        async with Redis(port=servers.ports[1]) as promoted:
            assert (await promoted.info("replication"))["role"] == "master"


async def test_client_of_demoted_primary_writes_to_new_primary(servers: SentinelPair) -> None:
    url = sentinels(servers)
    async with connect(url, POOL) as redis, reading(url, POOL) as following:
        assert await following() == Snapshot(())
        await redis.set("{test}:before", 1, px=60_000)
        async with Redis(port=servers.sentinel_port, password=servers.PASSWORD) as sentinel:
            await command(sentinel, "SENTINEL", "FAILOVER", servers.SERVICE)
        async with Redis(port=servers.ports[0]) as demoted:
            await eventually(partial(replication_is, demoted, "role", "slave"))
            await eventually(partial(written, redis, "{test}:after"))
        assert await redis.get("{test}:before") == b"1"
        async with Redis(port=servers.ports[1]) as promoted:
            assert await promoted.exists("{test}:after")
        await StateWriter(redis, POOL, ttl_s=60).put([A])
        await until_known(following, A)


async def test_connection_to_demoted_single_server_is_renewed(tmp_path: Path) -> None:
    """The name or address moves to the new primary."""
    port = free_port()
    async with (
        await start(tmp_path, port, {}),
        connect(f"redis://{HOST}:{port}", POOL) as redis,
        Redis(port=port) as admin,
    ):
        first = await redis.client_id()
        await command(admin, "REPLICAOF", HOST, free_port())
        with pytest.raises(RedisError, match="no longer accepts writes"):
            await redis.set("{test}:key", 1, px=1000)
        assert await redis.client_id() != first


async def test_cluster_failover_is_followed(tmp_path: Path) -> None:
    async with running(RedisCluster(tmp_path)) as nodes:
        url = cluster_at(*reversed(nodes.ports))
        await share_through(cluster_at(nodes.ports[1]))
        async with publishing(url) as publisher, reading(url, POOL) as following:
            assert await following() == Snapshot(())
            publisher.put(A)
            await until_known(following, A)
            await nodes.miss_after(1.0)
            await nodes.nodes[0].kill()
            publisher.put(structs.replace(A, running=77))
            await until_known(following, structs.replace(A, running=77))


async def test_cluster_node_in_place_of_a_single_server_is_named(tmp_path: Path) -> None:
    async with (
        running(RedisCluster(tmp_path)) as nodes,
        connect(f"redis://{HOST}:{nodes.ports[1]}", POOL) as redis,
    ):
        with pytest.raises(RedisError, match=r"Cluster: set redis\.cluster"):
            await redis.set("{test}:a", 1, px=1000)


async def test_moved_cluster_slot_is_followed(tmp_path: Path) -> None:
    """Scripts and transactions work, as all keys of a pool are on the same node."""
    async with running(RedisCluster(tmp_path)) as nodes:
        url = cluster_at(nodes.ports[2])
        async with connect(url, POOL) as redis:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.set("{test}:a", 1, px=60_000)
                pipe.set("{test}:b", 2, px=60_000)
                assert await pipe.execute() == [True, True]
            assert await redis.eval("return redis.call('get', KEYS[1])", 1, "{test}:a") == b"1"
            owner, target = (Redis(port=port) for port in nodes.ports[:2])
            async with owner, target:
                slot = await command(owner, "CLUSTER", "KEYSLOT", "{test}")
                ids = [await command(node, "CLUSTER", "MYID") for node in (owner, target)]
                await owner.delete("{test}:a", "{test}:b")
                for node in (target, owner):
                    await command(node, "CLUSTER", "SETSLOT", slot, "NODE", ids[1])
            with pytest.raises(RedisError, match="no longer accepts writes"):
                await redis.set("{test}:a", 3, px=60_000)
            await eventually(partial(written, redis, "{test}:a"))


def sentinels(
    servers: SentinelPair, *before: str, service: str = SentinelPair.SERVICE
) -> RedisSettings:
    return RedisSettings(
        sentinels=(*before, f"{HOST}:{servers.sentinel_port}"),
        service=service,
        sentinel_username=servers.USER,
        sentinel_password=servers.PASSWORD,
    )


def cluster_at(*ports: int) -> RedisSettings:
    return RedisSettings(cluster=tuple(f"{HOST}:{port}" for port in ports))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_redis(monkeypatch, 10.0)


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[SentinelPair]:
    async with running(SentinelPair(tmp_path)) as servers:
        yield servers


def mutual_tls(certificate: Path) -> ssl.SSLContext:
    """Returns the context of a server that admits only clients with its own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_certificate(file: Path) -> None:
    key = file.with_name("key.pem")
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    openssl("req", "-x509", *NEW_KEY, "-days", 1, *subject, "-keyout", key, "-out", file)
    file.write_text(file.read_text() + key.read_text())


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    make_certificate(file := tmp_path / "certificate.pem")
    return file
