"""Scrapes read vLLM's pages; any other answer is an error, bounded in time and size."""

import socket
from collections.abc import AsyncIterator
from io import BytesIO

import pytest
from aiohttp import ClientSession, web

from extproc.lab.harness.processes import free_port
from extproc.poll.metrics_text import ScrapeError
from extproc.poll.models import read_models, takes_priority
from extproc.poll.scrape import open_session, responds, scrape
from tests.poll.replica import (
    Handler,
    ScriptedReplica,
    disconnect,
    drip,
    endless,
    hang,
    page,
    serving,
    text,
)
from tests.waiting import PATIENCE_S


@pytest.fixture
async def session() -> AsyncIterator[ClientSession]:
    async with open_session(5) as session:
        yield session


async def redirect(_: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/elsewhere")


async def compressed(_: web.Request) -> web.StreamResponse:
    response = web.Response(text=page())
    response.enable_compression(web.ContentCoding.gzip)
    return response


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/health", text("", 503), "/health answered 503"),
        ("/health", hang, "/health did not answer within 0.2 s"),
        ("/metrics", text(page(), 500), "/metrics answered 500"),
        ("/metrics", hang, "/metrics did not answer within 0.2 s"),
        ("/metrics", drip, "/metrics did not end within 0.2 s"),
        ("/metrics", text("<html></html>"), "is this vLLM"),
        ("/metrics", text(b"\xff\x00" * 1000), "is this vLLM"),
        ("/metrics", compressed, "is this vLLM"),
        ("/metrics", text(page().replace("2.0", "NaN")), "impossible value"),
        ("/metrics", redirect, "/metrics answered 302"),
        ("/metrics", disconnect, "/metrics failed"),
    ],
)
async def test_bad_answer_raises_an_error_that_names_it(
    path: str, answer: Handler, problem: str
) -> None:
    patience_s = 0.2 if "0.2 s" in problem else PATIENCE_S
    async with serving() as replica, open_session(patience_s) as session:
        replica.answers[path] = answer
        with pytest.raises(ScrapeError, match=problem):
            await scrape(session, replica.id)
        replica.answers |= {"/health": text(""), "/metrics": text(page())}
        assert (await scrape(session, replica.id)).running == 2


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_oversized_answer_is_cut_off(path: str) -> None:
    async with serving() as replica, open_session(30) as session:
        replica.answers[path] = endless
        with pytest.raises(ScrapeError, match="larger than 4 MiB"):
            await scrape(session, replica.id)


async def test_old_adapter_sets_do_not_count_towards_the_size_limit() -> None:
    """vLLM's page keeps a line for each set of adapters that ever ran."""

    def line(names: str, when: str) -> str:
        labels = f'running_lora_adapters="{names}",waiting_lora_adapters="{names}"'
        return f'vllm:lora_requests_info{{max_lora="8",{labels}}} {when}'

    old = [line("a" * 200, f"1.79{second:07}e+09") for second in range(10_500)]
    newest = line("b,c", "1.7999e+09")
    begin, config, end = page().partition("vllm:cache_config_info")
    sets = ["# TYPE vllm:lora_requests_info gauge", *old[:7000], newest, *old[7000:], "# TYPE", ""]
    whole = (begin + "\n".join(sets) + config + end).encode()
    assert len(whole) > 4 * 2**20

    async def long(_: web.Request) -> web.StreamResponse:
        return web.Response(body=BytesIO(whole))

    async with serving() as replica, open_session(PATIENCE_S) as session:
        replica.answers["/metrics"] = long
        figures = await scrape(session, replica.id)
    assert (figures.max_loras, figures.adapters_in_use) == (8, ("b", "c"))
    assert (figures.running, figures.kv_tokens, figures.steps) == (2, 1600, 100)


@pytest.mark.parametrize(
    ("metrics", "health", "expected"),
    [
        (hang, text(""), True),
        (hang, text("", 503), True),
        (hang, drip, True),
        (text(page()), hang, True),
        (hang, hang, False),
    ],
)
async def test_replica_responds_if_any_request_is_answered(
    metrics: Handler, health: Handler, expected: bool
) -> None:
    async with serving() as replica, open_session(PATIENCE_S if expected else 0.2) as session:
        replica.answers |= {"/metrics": metrics, "/health": health}
        assert await responds(session, replica.id) is expected


async def test_refused_connection_is_an_error_and_a_response() -> None:
    async with open_session(1) as session:
        with pytest.raises(ScrapeError, match="cannot connect: connection refused"):
            await scrape(session, f"127.0.0.1:{free_port()}")
        assert await responds(session, f"127.0.0.1:{free_port()}")


async def test_machine_that_accepts_no_connection_does_not_respond() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with socket.create_connection(address):
            async with open_session(0.4) as session:
                replica = f"127.0.0.1:{address[1]}"
                with pytest.raises(ScrapeError, match="cannot connect: timed out") as failure:
                    await scrape(session, replica)
                assert failure.value.silent
                assert not await responds(session, replica)


@pytest.mark.parametrize(
    ("version", "takes"),
    [
        (text('{"version": "0.11.0"}'), True),
        (text('{"version": "0.33.1rc2.dev20+gabcdef"}'), True),
        (text('{"version": "1.0"}'), True),
        (text('{"version": "0.10.2"}'), False),
        (text('{"version": "0.9.2"}'), False),
        (text('{"version": "dev"}'), False),
        (text('{"version": 32}'), False),
        (text("a proxy's page"), False),
        (text("", 404), False),
    ],
)
async def test_vllm_versions_from_0_11_accept_priorities(
    replica: ScriptedReplica, session: ClientSession, version: Handler, takes: bool
) -> None:
    replica.answers["/version"] = version
    assert await takes_priority(session, replica.id) is takes


@pytest.mark.parametrize(
    "answer",
    [
        text("", 401),
        text(""),
        text("[]"),
        text('{"data": [{"id": 7}]}'),
        text('{"data": [{}]}'),
        text('{"data": [{"id": "a", "max_model_len": 0}]}'),
        text('{"data": [{"id": "a", "max_model_len": 1%s}]}' % ("0" * 400)),
        text("[" * 100_000),
        text(b"\xff"),
        endless,
    ],
)
async def test_malformed_model_list_is_an_error(
    replica: ScriptedReplica, session: ClientSession, answer: Handler
) -> None:
    replica.answers["/v1/models"] = answer
    with pytest.raises(ScrapeError, match="/v1/models"):
        await read_models(session, replica.id)


async def test_connections_are_reused(replica: ScriptedReplica, session: ClientSession) -> None:
    ports = set()

    async def record_port(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        return web.Response(text=page())

    replica.answers |= {"/health": record_port, "/metrics": record_port}
    for _ in range(5):
        await scrape(session, replica.id)
    assert len(ports) == 2
