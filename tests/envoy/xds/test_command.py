"""The program ``extproc xds``."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from envoy_data_plane.envoy.config.endpoint.v3 import ClusterLoadAssignment
from redis.asyncio import Redis

from extproc.cli import main
from extproc.envoy.xds.catalog import CLUSTERS, ENDPOINTS, LISTENERS
from extproc.envoy.xds.server import ADS
from extproc.lab.harness.processes import Process, free_port, listening
from extproc.replica_state import ReplicaState
from extproc.share.replicas import StateWriter
from tests.conftest import RedisServer
from tests.envoy.xds.conftest import EnvoySide

pytestmark = pytest.mark.process

ENVOY = Path(__file__).parents[3] / "envoy"


@asynccontextmanager
async def control_plane(
    directory: Path, settings: Mapping[str, object]
) -> AsyncIterator[tuple[Process, int]]:
    """The program, and its port."""
    port = free_port()
    flags = {"xds.listen": f"127.0.0.1:{port}", **settings}
    argv = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    async with await Process.start(
        "xds",
        [sys.executable, "-m", "extproc", "xds", *argv],
        log=directory / "xds.log",
        ready=listening(port),
    ) as process:
        yield process, port


@asynccontextmanager
async def running(
    directory: Path, settings: Mapping[str, object]
) -> AsyncIterator[tuple[Process, EnvoySide]]:
    """The program, and a stream to it."""
    async with (
        control_plane(directory, settings) as (process, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call = channel.stream_stream(f"/{ADS}/StreamAggregatedResources")()
        yield process, EnvoySide(call)


async def test_each_pool_is_a_resource(
    tmp_path: Path, redis_server: RedisServer, redis_client: Redis
) -> None:
    settings = {"redis.url": redis_server.url, "pools": "{batch: {}}"}
    async with running(tmp_path, settings) as (_, stream):
        await stream.ask(ENDPOINTS, "default", "batch")
        for pool, replica in (("default", "10.0.0.1:80"), ("batch", "10.0.0.2:80")):
            await StateWriter(redis_client, pool, ttl_s=60).put([ReplicaState(id=replica)])
        found: dict[str, int] = {}
        while len(found) < 2:
            response = await stream.response()
            found = {
                assignment.cluster_name: len(assignment.endpoints[0].lb_endpoints)
                for one in response.resources
                for assignment in [ClusterLoadAssignment.parse(one.value)]
            }
            await stream.ask(ENDPOINTS, "default", "batch", answering=response)
    assert found == {"default": 1, "batch": 1}


async def test_an_envoy_file_is_served_and_followed_without_redis(tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_bytes((ENVOY / "envoy.yaml").read_bytes())
    settings = {"redis.url": f"redis://127.0.0.1:{free_port()}/0", "xds.envoy_file": path}
    async with running(tmp_path, settings) as (process, stream):
        await stream.ask(LISTENERS)
        first = await stream.response()
        await stream.ask(LISTENERS, answering=first)
        await stream.ask(CLUSTERS)
        clusters = await stream.response()
        assert len(clusters.resources) == 2
        await stream.ask(CLUSTERS, answering=clusters)
        text = path.read_text(encoding="utf-8").replace("stat_prefix: openai", "stat_prefix: other")
        path.write_text(text, encoding="utf-8")
        second = await stream.response()
        assert second.type_url == LISTENERS
        assert b"other" in second.resources[0].value
        process.signal(15)
        assert await process.wait() == 0


@pytest.mark.parametrize(
    ("content", "problem"),
    [("a: b", "it is no bootstrap"), ("{", "not YAML")],
)
async def test_a_file_that_cannot_be_served_ends_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, problem: str
) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(content, encoding="utf-8")
    argv = ["xds", "--xds.envoy_file", str(path), "--xds.listen", f"127.0.0.1:{free_port()}"]
    assert await asyncio.to_thread(main, argv) == 2
    told = capfd.readouterr().err
    assert str(path) in told
    assert problem in told
