import json
from typing import Any

import pytest
from msgspec import to_builtins

from extproc.config import Config
from extproc.proxy.services import Services
from tests.fakes import ManualClock, replica, state
from tests.proxy.conftest import config_of, put_replicas
from tests.proxy.envoy_side import CHAT, DUPLEX, EnvoySide, Stream
from tests.proxy.replies import (
    BodyMode,
    body_of,
    chunk_of,
    common,
    destination,
    header_of,
    status_of,
)

ASKED = {"messages": CHAT["messages"], "model": "chat"}
BODY = json.dumps(ASKED).encode()
FIELDS = (f'"{name}":{json.dumps(value)}' for name, value in (ASKED | {"model": "llama"}).items())
NAMED = f"{{{','.join(FIELDS)}}}".encode()  # the bytes of each value stay


@pytest.fixture
def config() -> Config:
    return config_of(
        hold={"empty_s": 0},
        route={
            "models": {
                "chat": "llama",
                "any": ["a", "b"],
                "canary": {"llama": 1, "next": 99},
            },
        },
    )


async def test_whole_body_gets_model_name_and_length(stream: Stream, services: Services) -> None:
    await stream.request_headers(headers={"content-length": str(len(BODY))})
    reply = await stream.request_body(BODY)
    await stream.end()
    assert set(destination(reply)) == {replica(1), replica(2)}
    assert (body_of(reply), header_of(reply, "content-length")) == (NAMED, str(len(NAMED)))
    record = to_builtins(services.log.after(0)[-1].record())
    assert (record["model"], record["served_as"]) == ("chat", "llama")


async def test_large_body_is_read_to_rewrite_model(stream: Stream) -> None:
    reply = await stream.request_headers(headers={"content-length": str(40 * 2**20)})
    assert destination(reply) == []
    assert body_of(await stream.request_body(BODY)) == NAMED


@pytest.mark.parametrize(("told", "length"), [({"content-length": "1000"}, "1001"), ({}, None)])
async def test_cut_body_named(envoy: EnvoySide, told: dict[str, str], length: str | None) -> None:
    begin = b'{"model": "chat", "messages": [{"role": "user", "content": "x'
    async with envoy.stream() as stream:
        await stream.request_headers(body_mode=BodyMode.BUFFERED_PARTIAL, headers=told)
        reply = await stream.request_body(begin, end_of_stream=False)
    assert body_of(reply) == begin.replace(b"chat", b"llama")
    assert header_of(reply, "content-length") == length


async def test_duplex_chunks_have_model_name(stream: Stream) -> None:
    await stream.write_headers(**DUPLEX)
    await stream.write_body(BODY[:-9], end_of_stream=False)
    await stream.write_body(BODY[-9:])
    assert destination(await stream.read())
    assert chunk_of(await stream.read()) == (NAMED, True)
    await stream.response_headers()
    answer = b'{"model":"llama"}'
    assert chunk_of(await stream.response_body(answer)) == (answer, True)


async def test_unaliased_model_leaves_body_unchanged(stream: Stream) -> None:
    reply = await stream.ask()
    assert common(reply).body_mutation is None
    await stream.response_headers()
    assert (await stream.response_body(b'{"model":"llama"}')).response_body is not None


@pytest.mark.parametrize("model", ["chat", "any"])
async def test_unhealthy_alias_gets_503(envoy: EnvoySide, services: Services, model: str) -> None:
    """Envoy's fallback would send it as it is, and a replica that is just back answer 404."""
    clock = ManualClock(services.wall())
    for number in (1, 2):
        figures: dict[str, Any] = {"models": (), "healthy": False}
        services.fleet.put(state(number, "llama-8b-a10", clock, **figures))
    assert status_of(await envoy.ask(ASKED | {"model": model})) == 503


@pytest.mark.parametrize(
    "other", [{"healthy": False}, {"models": ("other",)}, {"models": ("other",), "listed": False}]
)
async def test_canary_with_all_targets_down_answers_503(
    envoy: EnvoySide, services: Services, other: dict[str, Any]
) -> None:
    put_replicas(services, 1, healthy=False)
    put_replicas(services, 2, **other)
    for _ in range(10):
        assert status_of(await envoy.ask(ASKED | {"model": "canary"})) == 503
