import json
from typing import Any

import pytest
from envoy_data_plane.envoy.service.ext_proc.v3 import ProcessingResponse

from extproc.config import Config
from extproc.proxy.services import Services
from tests.fakes import ManualClock, state
from tests.proxy.conftest import config_of, put_replicas
from tests.proxy.envoy_side import CHAT, EnvoySide
from tests.proxy.replies import BodyMode, body_of, chunk_of, common, header_of

OBJECTIVE = "x-objective"
PRIORITY = "x-vllm-priority"
URGENT = {OBJECTIVE: "urgent"}
OBJECTIVES = {"urgent": {"priority": 10}, "batch": {"priority": -20}, "usual": {"ttft_s": 5}}


@pytest.fixture
def config() -> Config:
    return config_of(
        hold={"objective_header": OBJECTIVE, "objectives": OBJECTIVES},
        route={"models": {"chat": "llama"}, "seed": 1},
    )


@pytest.fixture(autouse=True)
def replicas(services: Services) -> None:
    put_replicas(services, takes_priority=True)


async def sent(
    envoy: EnvoySide, body: dict[str, Any], objective: str, path: str = "/v1/chat/completions"
) -> ProcessingResponse:
    async with envoy.stream() as stream:
        headers = {OBJECTIVE: objective} if objective else {}
        return await stream.body_first(body, path, headers)


@pytest.mark.parametrize(
    ("objective", "said", "written"),
    [
        ("urgent", {}, -10),
        ("batch", {}, 20),
        ("urgent", {"priority": -999}, -10),
        ("", {"priority": -999}, 0),
        ("usual", {"priority": -999}, 0),
        ("unheard of", {"priority": -999}, 0),
    ],
)
async def test_objective_sets_priority_in_body(
    envoy: EnvoySide, objective: str, said: dict[str, int], written: int
) -> None:
    reply = await sent(envoy, CHAT | said, objective)
    body = body_of(reply)
    assert body is not None
    assert json.loads(body) == CHAT | {"priority": written}
    assert header_of(reply, "content-length") == str(len(body))
    assert header_of(reply, PRIORITY) == str(written)


async def test_priority_is_written_before_trailers(envoy: EnvoySide) -> None:
    reply = await envoy.ask_body_first(CHAT | {"priority": -999}, end_of_stream=False)
    assert json.loads(body_of(reply) or b"") == CHAT | {"priority": 0}


async def test_body_without_priority_stays_unchanged(envoy: EnvoySide) -> None:
    for objective in ("", "usual"):
        assert common(await sent(envoy, CHAT, objective)).body_mutation is None


async def test_priority_and_model_name_are_written_together(envoy: EnvoySide) -> None:
    body = body_of(await sent(envoy, CHAT | {"model": "chat"}, "urgent"))
    assert json.loads(body or b"") == CHAT | {"priority": -10}


async def test_duplex_chunks_have_priority(envoy: EnvoySide) -> None:
    async with envoy.stream() as stream:
        await stream.ask_in_full_duplex(headers=URGENT)
        body, last = chunk_of(await stream.read())
    assert (json.loads(body), last) == (CHAT | {"priority": -10}, True)


async def test_priority_is_written_after_headers(envoy: EnvoySide) -> None:
    body = body_of(await envoy.ask(CHAT, headers=URGENT))
    assert json.loads(body or b"") == CHAT | {"priority": -10}


async def test_truncated_body_gets_priority_header(envoy: EnvoySide) -> None:
    async with envoy.stream() as stream:
        await stream.request_headers(body_mode=BodyMode.BUFFERED_PARTIAL, headers=URGENT)
        reply = await stream.request_body(b'{"model":"llama","x":1', end_of_stream=False)
    assert common(reply).body_mutation is None
    assert header_of(reply, PRIORITY) == "-10"


async def test_priority_needs_support_of_all_replicas(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, 2, takes_priority=False)
    for _ in range(4):
        assert common(await sent(envoy, CHAT, "urgent")).body_mutation is None
    body = body_of(await sent(envoy, CHAT | {"priority": -999}, "urgent"))
    assert json.loads(body or b"") == CHAT | {"priority": 0}
    put_replicas(services, 2, takes_priority=True)
    assert common(await sent(envoy, CHAT, "urgent")).body_mutation is not None


async def test_loading_replica_leaves_priority(envoy: EnvoySide, services: Services) -> None:
    loading = state(3, "llama-8b-a10", ManualClock(services.wall()), models=(), healthy=False)
    services.fleet.put(loading)
    assert json.loads(body_of(await sent(envoy, CHAT, "urgent")) or b"")["priority"] == -10


async def test_endpoint_without_priority_gets_none(envoy: EnvoySide) -> None:
    body = CHAT | {"max_tokens": 5}
    assert common(await sent(envoy, body, "urgent", "/v1/messages")).body_mutation is None
    assert common(await sent(envoy, body, "urgent", "/v1/responses")).body_mutation is not None


class TestWithoutNames:
    @pytest.fixture
    def config(self) -> Config:
        return config_of(hold={"objective_header": OBJECTIVE, "objectives": OBJECTIVES})

    async def test_large_body_gets_priority_header(self, envoy: EnvoySide) -> None:
        async with envoy.stream() as stream:
            headers = URGENT | {"content-length": f"{2**24}"}
            reply = await stream.request_headers(headers=headers)
        assert reply.request_headers is not None
        assert header_of(reply, PRIORITY) == "-10"


class TestWithoutObjectives:
    @pytest.fixture
    def config(self) -> Config:
        return config_of(route={"seed": 1})

    async def test_client_priority_passes_without_objectives(self, envoy: EnvoySide) -> None:
        reply = await sent(envoy, CHAT | {"priority": -999}, "")
        assert common(reply).body_mutation is None
        assert header_of(reply, PRIORITY) is None
