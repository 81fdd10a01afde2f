"""A real Envoy gets its replicas by EDS, and listeners and clusters from watched files."""

import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import yaml
from envoy_data_plane.envoy.config.core.v3 import HealthStatus
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from extproc.config import MutualTlsSettings
from extproc.envoy.eds import load_assignment
from extproc.envoy.eds_server import METHOD, SERVICE, EdsServer
from extproc.ground.clock import monotonic
from extproc.lab.harness.envoy_config import endpoints, socket_address
from extproc.lab.harness.processes import Process, flags, free_port, listening
from extproc.replica_state import ReplicaState
from extproc.share.assignment import Assigner
from extproc.share.connection import connect
from extproc.share.replicas import StateWriter
from tests.certificates import Authority
from tests.conftest import Logged, RedisServer
from tests.e2e.test_security import documented
from tests.envoy import test_envoy
from tests.envoy.members import EnvoyMembers
from tests.envoy.test_eds import request, response
from tests.envoy.test_envoy import post, replica
from tests.envoy.watched_files import bootstrap, split
from tests.share.servers import Proxy, proxied
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

ENVOY = Path(__file__).parents[2] / "envoy"
POOL = "default"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PLAIN = MutualTlsSettings()


class RunningEnvoy(NamedTuple):
    url: str
    members: EnvoyMembers


@asynccontextmanager
async def running(directory: Path, tree: dict[str, Any], port: int) -> AsyncIterator[RunningEnvoy]:
    """Run Envoy with a bootstrap whose listener has this port."""
    admin = free_port()
    where = {"address": socket_address(f"127.0.0.1:{admin}")}
    async with test_envoy.running(directory, tree | {"admin": where}, admin):
        yield RunningEnvoy(f"http://127.0.0.1:{port}", EnvoyMembers(f"http://127.0.0.1:{admin}"))


def asking(port: int, *servers: int) -> dict[str, Any]:
    """Return envoy/eds.yaml with these ports of its listener and of EDS servers."""
    tree: dict[str, Any] = yaml.safe_load((ENVOY / "eds.yaml").read_text(encoding="utf-8"))
    clusters = {cluster["name"]: cluster for cluster in tree["static_resources"]["clusters"]}
    clusters["eds"]["load_assignment"]["endpoints"] = endpoints(
        f"127.0.0.1:{server}" for server in servers
    )
    (listener,) = tree["static_resources"]["listeners"]
    listener["address"] = socket_address(f"127.0.0.1:{port}")
    return tree


@asynccontextmanager
async def serving(
    members: Mapping[str, HealthStatus], files: MutualTlsSettings = PLAIN
) -> AsyncIterator[tuple[EdsServer, dict[str, Any], int]]:
    """Serve a pool; yield a bootstrap that subscribes to it, and the port of its listener."""
    pools = {POOL: partial(load_assignment, POOL, members)}
    server, port = EdsServer(pools, files), free_port()
    tree = asking(port, await server.start("127.0.0.1:0"))
    try:
        yield server, tree, port
    finally:
        await server.stop()


def healthy(address: str) -> dict[str, HealthStatus]:
    return {address: HealthStatus.HEALTHY}


async def test_envoy_gets_replicas_over_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    cert, key, ca = (tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt"))
    for source, target in zip(
        (*authority.sign("router"), authority.file), (cert, key, ca), strict=True
    ):
        shutil.copy(source, target)
    files = MutualTlsSettings(tls_cert=cert, tls_key=key, tls_client_ca=ca)
    async with replica("a") as a, serving(healthy(a), files) as (_, tree, port):
        (cluster,) = [
            cluster for cluster in tree["static_resources"]["clusters"] if cluster["name"] == "eds"
        ]
        cluster |= documented(tmp_path)
        async with running(tmp_path, tree, port) as envoy:
            assert (await post(envoy.url))["name"] == "a"
            (plane,) = (await envoy.members.clusters())["eds"]
            assert "failed_active_health_check" not in plane["health_status"]


async def test_refused_update_is_logged_and_old_members_stay(
    tmp_path: Path, logged: Logged
) -> None:
    async with (
        replica("a") as a,
        serving(healthy(a)) as (server, tree, port),
        running(tmp_path, tree, port) as envoy,
    ):
        await envoy.members.have(**{a: "HEALTHY"})
        server.put(POOL, partial(load_assignment, POOL, healthy("no-address:80")))
        line = await logged.line("envoy refused a list of replicas and keeps the old list")
        assert line["node"] == "envoy"
        assert "no-address" in str(line["reason"])
        assert (await post(envoy.url))["name"] == "a"


async def test_cluster_is_renamed_in_watched_files_without_failed_requests(tmp_path: Path) -> None:
    """Follows docs/envoy.md: add the new cluster, then change the routes, then remove the old."""
    live = tmp_path / "live"
    async with replica("a") as a, serving(healthy(a)) as (_, tree, port):
        renamed = yaml.safe_load(yaml.safe_dump(tree).replace("replicas", "renamed"))
        before, after = (whole["static_resources"] for whole in (tree, renamed))
        both = [
            *before["clusters"],
            *(cluster for cluster in after["clusters"] if cluster["name"] == "renamed"),
        ]
        split(tree, live)
        async with running(tmp_path, bootstrap(tree, live), port) as envoy:

            async def has_both() -> bool:
                assert (await post(envoy.url))["name"] == "a"
                return {"replicas", "renamed"} <= (await envoy.members.clusters()).keys()

            async def routes_to_renamed() -> bool:
                assert (await post(envoy.url))["name"] == "a"
                (host,) = (await envoy.members.clusters())["renamed"]
                return any(stat["name"] == "rq_total" and "value" in stat for stat in host["stats"])

            async def has_renamed_alone() -> bool:
                assert (await post(envoy.url))["name"] == "a"
                names = (await envoy.members.clusters()).keys()
                return names == {"router", "eds", "renamed"}

            for listeners, clusters, done in (
                (before["listeners"], both, has_both),
                (after["listeners"], both, routes_to_renamed),
                (after["listeners"], after["clusters"], has_renamed_alone),
            ):
                step = {"listeners": listeners, "clusters": clusters}
                split({**tree, "static_resources": step}, live)
                await until(done)


@asynccontextmanager
async def started(directory: Path, settings: Mapping[str, object]) -> AsyncIterator[int]:
    """Start ``extproc eds``; yield the port at which the process will listen."""
    port = free_port()
    argv = flags({"eds.listen": f"127.0.0.1:{port}", **settings})
    async with await Process.start(
        "eds", [sys.executable, "-m", "extproc", "eds", *argv], log=directory / "eds.log"
    ) as process:
        yield port
        process.signal(15)
        assert await process.wait() == 0


@asynccontextmanager
async def instance(directory: Path, settings: Mapping[str, object]) -> AsyncIterator[int]:
    async with started(directory, settings) as port:
        await until(listening(port))
        yield port


async def test_port_opens_once_a_replica_of_any_pool_is_known(
    tmp_path: Path, stopped_redis: RedisServer
) -> None:
    """A probe of the port keeps a rollout with a wrong ``redis.url`` from replacing instances."""
    log = tmp_path / "eds.log"
    settings = {"redis.url": stopped_redis.url, "pools": "{batch: {}}"}
    async with started(tmp_path, settings) as port:
        is_open = listening(port)
        await until(lambda: "redis is lost" in log.read_text())
        assert not await is_open()
        await stopped_redis.start()
        await until(lambda: "redis is back" in log.read_text())
        assert not await is_open()
        async with connect(stopped_redis.url, POOL) as redis:
            await StateWriter(redis, POOL, ttl_s=60).put([ReplicaState(id="10.0.0.1:80")])
        await until(is_open)
        await stopped_redis.kill()
        await reports(port, NOT_SERVING)
        assert await is_open()


async def test_port_opens_if_pollers_read_every_source_and_find_no_replica(
    tmp_path: Path, redis_server: RedisServer, redis_client: Redis
) -> None:
    """A pool is scaled to zero while an instance restarts."""
    poller = Assigner(redis_client, POOL, "host:1:0a", monotonic)
    async with started(tmp_path, {"redis.url": redis_server.url}) as port:
        is_open = listening(port)

        async def is_noticed() -> bool:
            """True once the instance has read two heartbeats of a poller that misses a source."""
            await poller.beat([], ["Service vllm: no answer"])
            counts = await redis_client.info("commandstats")
            return bool(counts.get("cmdstat_mget", {"calls": 0})["calls"] >= 2)

        async def opens() -> bool:
            await poller.beat([])
            return await is_open()

        await until(is_noticed)
        assert not await is_open()
        await until(opens)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
            await call.write(request(POOL))
            (resource,) = (await response(call)).resources
        assert not any(
            each.lb_endpoints for each in ClusterLoadAssignment.parse(resource.value).endpoints
        )


async def test_each_pool_is_a_resource_of_eds(
    tmp_path: Path, redis_server: RedisServer, redis_client: Redis
) -> None:
    settings = {"redis.url": redis_server.url, "pools": "{batch: {}}"}
    await StateWriter(redis_client, POOL, ttl_s=60).put([ReplicaState(id="10.0.0.1:80")])
    async with (
        instance(tmp_path, settings) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        await call.write(request(POOL, "batch"))
        await StateWriter(redis_client, "batch", ttl_s=60).put([ReplicaState(id="10.0.0.2:80")])
        found: dict[str, int] = {}
        while len(found) < 2:
            update = await response(call)
            found = {
                assignment.cluster_name: len(assignment.endpoints[0].lb_endpoints)
                for resource in update.resources
                for assignment in [ClusterLoadAssignment.parse(resource.value)]
            }
            await call.write(request(POOL, "batch", answering=update))
    assert found == {POOL: 1, "batch": 1}


@asynccontextmanager
async def proxied_instance(directory: Path, redis: RedisServer) -> AsyncIterator[tuple[Proxy, int]]:
    async with (
        proxied(redis.port) as proxy,
        instance(directory, {"redis.url": f"redis://127.0.0.1:{proxy.port}/0"}) as port,
    ):
        yield proxy, port


def cut_off(proxy: Proxy) -> None:
    proxy.closed = True
    proxy.cut()


async def reports(port: int, status: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def matches() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest())
            return bool(answer.status == status)

        await until(matches)


async def test_envoy_leaves_eds_server_that_lost_redis(
    tmp_path: Path, redis_server: RedisServer, redis_client: Redis
) -> None:
    writer = StateWriter(redis_client, POOL, ttl_s=600)
    known: dict[str, str] = {}

    async def add() -> None:
        address = f"10.0.0.{len(known) + 1}:8000"
        known[address] = "HEALTHY"
        await writer.put([ReplicaState(id=address)])

    await add()
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(proxied_instance(tmp_path / name, redis_server))
            for name in ("first", "second")
        ]
        tree = asking(free_port(), *(port for _, port in servers))
        async with running(tmp_path, tree, 0) as envoy:
            await envoy.members.have(**known)
            for proxy, port in servers:  # Envoy asks one of the two
                cut_off(proxy)
                await reports(port, NOT_SERVING)
                await add()
                await envoy.members.have(**known)
                proxy.closed = False
                await reports(port, SERVING)
        for proxy, port in servers:
            cut_off(proxy)
            await reports(port, NOT_SERVING)
        async with running(tmp_path, tree, 0) as envoy:
            await envoy.members.have(**known)  # the last list of the servers
