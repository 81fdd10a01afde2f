"""Slow, silent and vanished clients and Envoys take a bounded part of the router."""

import json
from dataclasses import replace
from math import inf

import aiohttp
import grpc
import pytest
from prometheus_client import CollectorRegistry

from extproc.observe.admin import serve_admin
from extproc.proxy.admin import admin_routes
from extproc.proxy.body_memory import BodyMemory
from extproc.proxy.service import GrpcServer
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.fakes import chat, replica
from tests.proxy.conftest import config_of, put_replicas, traced
from tests.proxy.envoy_side import CHAT, EnvoySide, Stream
from tests.proxy.replies import MEMBERS, chunk_of, destination, error_of
from tests.share.servers import proxied
from tests.waiting import until

ROOM = 10_000
BEGUN = b'{"model": "llama", "messages": [{"role": "user", "content": "'


async def begin(stream: Stream, services: Services, free: float = inf) -> None:
    """Sends a part of a body; waits until less than ``free`` bytes of memory are free."""
    await stream.write_headers()
    await stream.write_body(BEGUN + b"a" * 4000, end_of_stream=False)
    await until(lambda: services.body_memory.free < free)


@pytest.mark.parametrize("config", [config_of(serve={"max_streams": 2})])
async def test_streams_beyond_max_streams_are_refused(services: Services, logged: Logged) -> None:
    """Envoy opens another connection if the present ones have ``max_streams`` each."""
    server = GrpcServer(services)
    port = await server.start("127.0.0.1:0")
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as channel,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=own) as other,
        EnvoySide(channel).stream() as first,
    ):
        await first.request_headers()
        async with EnvoySide(channel).stream() as second:
            await second.request_headers()
            for _ in range(3):
                async with EnvoySide(other).stream() as third:
                    with pytest.raises(grpc.aio.AioRpcError, match="too many requests"):
                        await third.request_headers()
            await second.end()
        assert set(destination(await first.request_body(CHAT))) == MEMBERS
        await first.end()
        assert set(destination(await EnvoySide(other).ask())) == MEMBERS
    await server.stop(0)
    assert [line["levelname"] for line in logged.lines() if "max_streams" in str(line["msg"])]
    assert len(logged.lines()) == 2  # when the overload begins, and when it is over


class TestBodies:
    @pytest.fixture
    def services(self, services: Services) -> Services:
        return replace(services, body_memory=BodyMemory(ROOM))

    async def test_stalled_body_is_evicted(self, envoy: EnvoySide, services: Services) -> None:
        async with envoy.stream() as stalled, envoy.stream() as slow, envoy.stream() as other:
            await begin(stalled, services, 6000)
            await begin(slow, services, 2000)
            await begin(other, services)
            assert error_of(await stalled.read())["code"] == "no_memory"
            await stalled.write_body(b"more")
            assert chunk_of(await stalled.read()) == (b"more", True)
            for stream in (slow, other):
                await stream.write_body(b'"}]}')
                assert destination(await stream.read())
                assert services.log.last(1)[0].decision.profile.prompt_bytes > 4000
        await until(lambda: services.body_memory.free == ROOM)

    async def test_full_body_memory_awaits_no_further_chunk(
        self, envoy: EnvoySide, services: Services
    ) -> None:
        services.body_memory.free = 100
        async with envoy.stream() as stream:
            await begin(stream, services)
            assert destination(await stream.read())
            assert chunk_of(await stream.read()) == (BEGUN + b"a" * 4000, False)
        put_replicas(services, 3, models=("other",))
        async with envoy.stream() as nameless:
            await nameless.write_headers("/v1/messages")
            await nameless.write_body(BEGUN.replace(b"model", b"other") + b"a" * 4000, False)
            assert error_of(await nameless.read())["type"] == "overloaded_error"
        await until(lambda: services.body_memory.free == 100)

    async def test_stalled_bodies_are_evicted_for_a_body_beyond_all_memory(
        self, envoy: EnvoySide, services: Services
    ) -> None:
        async with envoy.stream() as stalled, envoy.stream() as other, envoy.stream() as large:
            await begin(stalled, services, 6000)
            await begin(other, services, 2000)
            await large.write_headers()
            await large.write_body(BEGUN + b"a" * 3 * ROOM + b'"}]}')
            for stream in (stalled, other):
                assert error_of(await stream.read())["code"] == "no_memory"
            assert destination(await large.read())[0] in MEMBERS

    async def test_unread_replies_count_as_body_memory(
        self, over_grpc: EnvoySide, services: Services, logged: Logged
    ) -> None:
        size = 4 * 2**20  # more than gRPC takes in advance
        services.body_memory.free = size + 100
        async with over_grpc.stream() as stream:
            await stream.write_headers()
            await stream.write_body(BEGUN + b"a" * size + b'"}]}')
            await until(lambda: services.fleet.in_flight == 1)
            assert services.body_memory.free < 100
            stream.reset()
            await until(lambda: services.body_memory.free == size + 100)
        await until(lambda: services.fleet.in_flight == 0)
        assert not logged.lines()


@pytest.mark.parametrize(
    ("path", "body", "size", "bound"),
    [
        ("/v1/chat/completions", BEGUN + b"a" * 4 * 2**20 + b'"}]}', 4 * 2**20, 2**20),
        ("/v1/completions", json.dumps({"prompt": [*range(150_000)]}).encode(), *[150_000 * 4] * 2),
    ],
    ids=["text", "token ids"],
)
async def test_request_in_flight_does_not_keep_its_body(
    envoy: EnvoySide, stream: Stream, path: str, body: bytes, size: int, bound: int
) -> None:
    await envoy.ask(body, path)  # imports modules and fills caches
    await stream.request_headers(path)
    _, held, most = await traced(stream.request_body(body))
    assert most > size
    assert held < bound


async def test_logged_decision_keeps_no_arrays_of_requests_in_flight(
    envoy: EnvoySide, services: Services
) -> None:
    """The arrays serve only the decision, and thousands of records may be kept."""
    records, in_flight = 10, 5_000
    put_replicas(services, 3, healthy=False)
    for _ in range(in_flight):
        services.fleet.dispatch(replica(1), chat(10))
    await envoy.ask()
    _, held, _ = await traced(*(envoy.ask() for _ in range(records)))
    assert len(services.log.last(2 * records)) == records + 1
    assert held < records * in_flight * 8


@pytest.mark.slow
async def test_keepalive_ends_requests_of_vanished_envoy(services: Services) -> None:
    server = GrpcServer(services, keepalive_s=2.0)
    port = await server.start("127.0.0.1:0")
    async with (
        proxied(port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as vanishing,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as staying,
        EnvoySide(vanishing).stream() as lost,
        EnvoySide(staying).stream() as other,
    ):
        for stream in (lost, other):
            await stream.ask()
        assert services.fleet.in_flight == 2
        proxy.vanished = True
        await until(lambda: services.fleet.in_flight == 1)
        await other.response_headers()  # as silent, but not vanished
        await other.end()
    await server.stop(0)


async def test_pages_show_no_prompt(envoy: EnvoySide, services: Services, logged: Logged) -> None:
    secret = "correct horse battery staple"
    chat = CHAT | {"messages": [{"role": "user", "content": secret}], "user": secret}
    await envoy.converse(
        chat,
        {"choices": [{"message": {"content": secret}}]},
        headers={"authorization": secret, "x-request-id": "mine"},
    )
    await envoy.ask(secret.encode())  # refused
    shown = []
    async with (
        serve_admin("127.0.0.1:0", CollectorRegistry(), admin_routes(services)) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        for page in ("/decisions", "/fleet", "/metrics"):
            async with session.get(page) as response:
                shown.append(await response.text())
    assert "mine" in shown[0]
    assert not [text for text in [*shown, str(logged.lines())] if "battery" in text]
