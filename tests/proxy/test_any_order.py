"""Messages in any order, with any of them missing: nobody fails, and nothing is left behind."""

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from envoy_data_plane.envoy.config.core.v3 import HeaderMap
from envoy_data_plane.envoy.service.ext_proc.v3 import (
    HttpBody,
    HttpTrailers,
    ProcessingRequest,
    ProtocolConfiguration,
)

from extproc.proxy.body_memory import MOST_HELD
from extproc.proxy.services import Services
from tests.conftest import Logged
from tests.proxy.conftest import samples
from tests.proxy.envoy_side import CHAT, EnvoySide, headers_message
from tests.proxy.replies import BodyMode, chosen
from tests.waiting import until

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/models")
FIELDS: dict[str, list[Any]] = {
    "model": ["llama", "nobody's", 5],
    "input": ["hello " * 50],
    "stream": [True],
    "n": [3],
    "max_tokens": [5, 500],
    "messages": ["hello"],
}
ANSWERS = (
    b'data: {"choices": [{"delta": {"content": "sea"}}]}\n\n',
    b'{"id": "resp_1", "usage": {"prompt_tokens": 60, "completion_tokens": 5}}',
    b"\xff",
)


def messages(random: Random) -> list[ProcessingRequest]:
    told = [one for one in exchange(random) if random.random() < 0.8]
    if random.random() < 0.3:
        random.shuffle(told)
    return told


def exchange(random: Random) -> Iterator[ProcessingRequest]:
    fields = {name: random.choice(values) for name, values in FIELDS.items()}
    body = json.dumps(CHAT | {name: fields[name] for name in random.sample([*FIELDS], 2)}).encode()
    headers = {":method": "POST", ":path": random.choice(PATHS), "content-length": f"{len(body)}"}
    mode, cut = random.choice([*BodyMode]), random.randrange(len(body))
    yield ProcessingRequest(
        request_headers=headers_message(headers, end_of_stream=False),
        protocol_config=ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
    )
    yield ProcessingRequest(request_body=HttpBody(body=body[:cut]))
    yield ProcessingRequest(request_body=HttpBody(body=body[cut:], end_of_stream=True))
    yield ProcessingRequest(request_trailers=HttpTrailers(trailers=HeaderMap()))
    headers = {":status": random.choice(["200", "500", "?"]), "content-type": "text/event-stream"}
    yield ProcessingRequest(response_headers=headers_message(headers, end_of_stream=False))
    for end in (False, True):
        chunk = HttpBody(body=random.choice(ANSWERS), end_of_stream=end)
        yield ProcessingRequest(response_body=chunk)
    yield ProcessingRequest(response_trailers=HttpTrailers(trailers=HeaderMap()))


@pytest.mark.parametrize("seed", range(5))
async def test_random_order(
    services: Services, over_grpc: EnvoySide, logged: Logged, seed: int
) -> None:
    random = Random(seed)

    async def ask() -> None:
        async with over_grpc.stream() as stream:
            if random.random() < 0.5:
                await stream.write(stream.body_message(CHAT))
            for message in messages(random):
                await stream.write(message)
            if random.random() < 0.7:
                await stream.end_unread()

    await asyncio.gather(*(ask() for _ in range(100)))
    await until(lambda: not services.fleet.in_flight)
    assert services.body_memory.free == MOST_HELD
    assert chosen(await over_grpc.ask_body_first())


@pytest.mark.parametrize("phases", range(4))
async def test_reset_leaks_nothing(over_grpc: EnvoySide, services: Services, phases: int) -> None:
    async with over_grpc.stream() as stream:
        await stream.request_headers()
        if phases > 0:
            await stream.request_body(CHAT)
        if phases > 1:
            await stream.response_headers()
        if phases > 2:
            await stream.response_body(b"{", end_of_stream=False)
        stream.reset()
    await until(lambda: services.fleet.in_flight == 0)
    await until(lambda: samples(services.metrics.open_streams) == {(): 0})
    view = services.fleet.view("llama")
    assert view.backlog.tolist() == pytest.approx([0, 0], abs=1e-6)
