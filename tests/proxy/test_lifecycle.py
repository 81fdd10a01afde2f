"""Start, health and stop of the gRPC server."""

import asyncio
import socket
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from extproc.config import MutualTlsSettings
from extproc.envoy.eds_server import EdsServer
from extproc.proxy.app import build
from extproc.proxy.service import SERVICE, GrpcServer
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.fakes import replica
from tests.proxy.conftest import alive, config_of, put_replicas
from tests.proxy.envoy_side import EnvoySide, running
from tests.proxy.replies import MEMBERS, destination
from tests.waiting import PATIENCE_S, until, until_read


async def test_invalid_message_ends_only_its_stream(services: Services) -> None:
    async with running(GrpcServer(services)) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Process")()
        await call.write(b"\xff\xff\xff")
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert set(destination(await EnvoySide(channel).ask())) == MEMBERS


async def serving(channel: grpc.aio.Channel) -> list[str]:
    """Health services that answer SERVING."""
    check, found = health_pb2_grpc.HealthStub(channel).Check, []
    for service in ("", SERVICE, "readiness", "liveness"):
        answer = await check(health_pb2.HealthCheckRequest(service=service))
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            found.append(service)
    return found


@pytest.mark.parametrize(
    "make", [GrpcServer, lambda _: EdsServer({}, MutualTlsSettings())], ids=["serve", "eds"]
)
async def test_server_that_cannot_listen_leaves_no_grpc_server(
    services: Services, make: Callable[[Services], GrpcServer | EdsServer]
) -> None:
    """At exit, gRPC prints an error about each server that was never stopped."""
    before, server = alive(grpc.aio.Server), make(services)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="cannot listen for Envoy"),
    ):
        await server.start(f"127.0.0.1:{taken.getsockname()[1]}")
    assert alive(grpc.aio.Server) <= before


async def test_drain_waits_for_open_streams(services: Services) -> None:
    server = GrpcServer(services)
    async with running(server) as channel, EnvoySide(channel).stream() as stream:
        assert len(await serving(channel)) == 4
        await stream.ask()
        stopping = asyncio.create_task(server.stop(drain_s=30))
        await asyncio.sleep(0)
        assert await serving(channel) == ["liveness"]
        await stream.response_headers()
        await stream.response_body({})
        assert not stopping.done()
        await stream.end()
        await asyncio.wait_for(stopping, PATIENCE_S)
    assert services.fleet.in_flight == 0


async def test_idle_router_that_stops_accepts_streams_until_envoy_leaves_it(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full duplex, Envoy answers 500 if the router refuses a stream."""
    monkeypatch.setattr("extproc.proxy.service.LAME_DUCK_S", 60.0)
    server = GrpcServer(services)
    async with running(server) as channel:
        stopping = asyncio.create_task(server.stop(drain_s=90))
        await until_read(lambda: serving(channel), lambda names: names == ["liveness"])
        assert set(destination(await EnvoySide(channel).ask())) == MEMBERS
        stopping.cancel()


async def test_router_is_ready_once_a_replica_is_known(logged: Logged) -> None:
    services = build(config_of(serve={"share": 0.05}), CollectorRegistry())
    server = GrpcServer(services)
    looking = asyncio.create_task(server.watch_replicas())
    async with running(server) as channel:
        assert await serving(channel) == ["liveness"]
        assert not logged.lines()
        put_replicas(services, healthy=False)
        await until_read(lambda: serving(channel), lambda names: len(names) == 4)
        line = await logged.line("router ready: it knows the replicas")
        assert (line["mode"], line["share"]) == ("route", 0.05)
        services.fleet.remove(replica(1))
        services.fleet.remove(replica(2))
        assert len(await serving(channel)) == 4
    looking.cancel()


@pytest.mark.parametrize(
    "pollers",
    [
        pytest.param(None, id="without Redis"),
        pytest.param({}, id="without pollers"),
        pytest.param({"host:1": ["Service vllm: no answer"]}, id="without the API server"),
    ],
)
def test_router_of_an_empty_pool_stays_ready(pollers: dict[str, list[str]] | None) -> None:
    """Requests go on waiting at the router for the pool's first replica."""
    services = build(config_of(), CollectorRegistry())
    server, services.fleet.pollers = GrpcServer(services), {"host:1": []}
    assert not server.unready()
    services.fleet.pollers = pollers
    assert not server.unready()


async def test_drain_ends_after_drain_s(services: Services, logged: Logged) -> None:
    server = GrpcServer(services)
    async with running(server) as channel, EnvoySide(channel).stream() as stream:
        await stream.ask()
        await asyncio.wait_for(server.stop(drain_s=0.05), PATIENCE_S)
        await until(lambda: services.fleet.in_flight == 0)
    assert not logged.lines()
