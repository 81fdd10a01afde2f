"""A control plane that loses Redis while another has it, and a real Envoy that asks both."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from redis.asyncio import Redis

from extproc.lab.harness.envoy_config import endpoints
from extproc.lab.harness.processes import free_port
from extproc.replica_state import ReplicaState
from extproc.share.replicas import StateWriter
from tests.conftest import RedisServer
from tests.envoy.xds import test_envoy
from tests.envoy.xds.test_command import control_plane
from tests.envoy.xds.test_envoy import ENVOY, Envoy
from tests.waiting import until

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

POOL = "default"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Cable:
    """Between a control plane and Redis; it may be pulled out."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends: set[asyncio.StreamWriter] = set()
        self._whole = True

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.close()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends |= {writer, back}
        await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))

    def pull(self) -> None:
        self._whole = False
        for end in self._ends:
            end.close()
        self._ends.clear()

    def plug(self) -> None:
        self._whole = True


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(2**16):
            writer.write(data)
    writer.close()


class Instance:
    """One control plane with a cable of its own."""

    def __init__(self, cable: Cable, port: int, channel: grpc.aio.Channel) -> None:
        self.cable = cable
        self.port = port
        self._health = health_pb2_grpc.HealthStub(channel)

    async def says(self, status: int) -> None:
        """Returns when that is what health checks are told."""

        async def so() -> bool:
            answer = await self._health.Check(health_pb2.HealthCheckRequest())
            return bool(answer.status == status)

        await until(so)


@asynccontextmanager
async def instance(directory: Path, redis: RedisServer) -> AsyncIterator[Instance]:
    cable = Cable(redis.port)
    server = await asyncio.start_server(cable.connected, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    try:
        async with (
            control_plane(directory, {"redis.url": url}) as (_, port),
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            yield Instance(cable, port, channel)
    finally:
        cable.pull()
        server.close()


def asking(*ports: int) -> dict[str, Any]:
    """envoy/xds.yaml with these control planes."""
    tree: dict[str, Any] = yaml.safe_load((ENVOY / "xds.yaml").read_text(encoding="utf-8"))
    clusters = {one["name"]: one for one in tree["static_resources"]["clusters"]}
    control_planes = endpoints(f"127.0.0.1:{port}" for port in ports)
    clusters["xds"]["load_assignment"]["endpoints"] = control_planes
    (listener,) = tree["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = free_port()
    return tree


async def test_envoy_leaves_a_control_plane_that_is_cut_off_from_redis(
    tmp_path: Path, redis_server: RedisServer, redis_client: Redis
) -> None:
    writer = StateWriter(redis_client, POOL, ttl_s=600)
    known: dict[str, str] = {}

    async def add() -> None:
        address = f"10.0.0.{len(known) + 1}:8000"
        known[address] = "HEALTHY"
        await writer.put([ReplicaState(id=address)])

    async def has_all(envoy: Envoy) -> None:
        await until(lambda: test_envoy.has(envoy, known))

    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(instance(tmp_path / name, redis_server))
            for name in ("first", "second")
        ]
        bootstrap = asking(first.port, second.port)
        await add()
        async with test_envoy.running(tmp_path, bootstrap, 0) as envoy:
            await has_all(envoy)
            for one in (first, second):  # whichever it asks, it has to leave
                one.cable.pull()
                await one.says(NOT_SERVING)
                await add()
                await has_all(envoy)
                one.cable.plug()
                await one.says(SERVING)
        for one in (first, second):
            one.cable.pull()
            await one.says(NOT_SERVING)
        async with test_envoy.running(tmp_path, bootstrap, 0) as envoy:
            await has_all(envoy)  # what the control planes heard last is better than nothing
