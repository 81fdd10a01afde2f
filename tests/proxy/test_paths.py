"""Every request that makes vLLM compute is booked, renamed and ordered, whatever its path."""

import json
from typing import Any

import pytest

from extproc.config import Config
from extproc.proxy.services import Services
from extproc.request.endpoint import Endpoint
from extproc.request.profile import RequestProfile
from tests.proxy.conftest import config_of, put_replicas
from tests.proxy.envoy_side import EnvoySide, Stream
from tests.proxy.replies import MEMBERS, body_of, chosen

TEXT = "of the sea " * 40
CHAT = {"messages": [{"role": "user", "content": TEXT}]}
IDS = list(range(1000))
TOKENS_OF_TEXT = len(TEXT) / 4


@pytest.fixture
def config() -> Config:
    return config_of(
        hold={"objectives": {"urgent": {"priority": 10}}},
        route={"models": {"alias": "llama"}, "seed": 1},
    )


@pytest.fixture(autouse=True)
def replicas(services: Services) -> None:
    put_replicas(services, takes_priority=True)


REQUESTS: list[tuple[str, dict[str, Any], Endpoint, float]] = [
    ("/v1/chat%2Fcompletions", CHAT, Endpoint.CHAT, TOKENS_OF_TEXT),
    ("/v1%2F%63hat/completions?a=%2F", CHAT, Endpoint.CHAT, TOKENS_OF_TEXT),
    ("/pool/v1/chat/completions/batch", {"messages": [CHAT["messages"]] * 2}, Endpoint.CHAT,
     2 * TOKENS_OF_TEXT),
    ("/cohere/v2/chat", CHAT, Endpoint.CHAT, TOKENS_OF_TEXT),
    ("/generative_scoring", {"query": TEXT, "items": [TEXT]}, Endpoint.SCORE, 2 * TOKENS_OF_TEXT),
    ("/v1/systemone", {"state": TEXT, "questions": {}}, Endpoint.POOLING, TOKENS_OF_TEXT),
    ("/inference/v1/generate", {"token_ids": IDS}, Endpoint.GENERATE, len(IDS)),
    ("/invocations", CHAT, Endpoint.CHAT, TOKENS_OF_TEXT),
    ("/invocations", {"prompt": TEXT}, Endpoint.COMPLETIONS, TOKENS_OF_TEXT),
    ("/invocations", {"input": TEXT}, Endpoint.EMBEDDINGS, TOKENS_OF_TEXT),
    ("/invocations", {"query": TEXT, "documents": ["x"]}, Endpoint.RERANK, TOKENS_OF_TEXT),
    ("/invocations", {"text_1": TEXT, "text_2": "x"}, Endpoint.SCORE, TOKENS_OF_TEXT),
    ("/invocations", {"data": TEXT}, Endpoint.POOLING, TOKENS_OF_TEXT),
    ("/pooling", {"data": {"text": TEXT}}, Endpoint.POOLING, TOKENS_OF_TEXT),
    ("/v2/embed", {"inputs": [{"content": [{"type": "text", "text": TEXT}]}]}, Endpoint.EMBEDDINGS,
     TOKENS_OF_TEXT),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "endpoint", "tokens"), REQUESTS)
async def test_request_is_booked_renamed_and_ordered(
    stream: Stream,
    services: Services,
    path: str,
    body: dict[str, Any],
    endpoint: Endpoint,
    tokens: float,
) -> None:
    reply = await stream.body_first(body | {"model": "alias", "priority": -999}, path)
    assert services.fleet.in_flight == 1
    await stream.end()
    assert set(chosen(reply)) == MEMBERS
    assert json.loads(body_of(reply) or b"") == body | {"model": "llama", "priority": 0}
    profile = services.log.last(1)[0].decision.profile
    assert profile.endpoint is endpoint
    assert profile.prompt_tokens == pytest.approx(tokens, rel=0.25)


async def profile_of(
    envoy: EnvoySide, services: Services, path: str, body: dict[str, Any]
) -> tuple[RequestProfile, float]:
    await envoy.ask_body_first(body | {"model": "llama"}, path)
    decision = services.log.last(1)[0].decision
    return decision.profile, decision.prediction.output_tokens


async def test_unbounded_ignored_end_fills_context(envoy: EnvoySide, services: Services) -> None:
    put_replicas(services, max_model_len=8_192)
    body = CHAT | {"ignore_eos": True}
    profile, output = await profile_of(envoy, services, "/v1/chat/completions", body)
    assert output == pytest.approx(8_192 - profile.prompt_tokens)


@pytest.mark.parametrize(
    ("sampling", "output"),
    [({"max_tokens": 7, "ignore_eos": True, "n": 3}, 7), ({"ignore_eos": True}, 8_192 - len(IDS))],
)
async def test_token_ids_are_bounded_by_their_sampling_parameters(
    envoy: EnvoySide, services: Services, sampling: dict[str, Any], output: float
) -> None:
    put_replicas(services, max_model_len=8_192)
    body = {"token_ids": IDS, "sampling_params": sampling}
    profile, predicted = await profile_of(envoy, services, "/inference/v1/generate", body)
    assert predicted == pytest.approx(output)
    assert profile.sequences == sampling.get("n", 1)


async def test_echo_alone_generates_nothing(envoy: EnvoySide, services: Services) -> None:
    body = {"prompt": TEXT, "echo": True, "max_tokens": 0}
    profile, output = await profile_of(envoy, services, "/v1/completions", body)
    assert (profile.output_bound, profile.sequences, output) == (0, 0, 0)


@pytest.mark.parametrize("field", ["prompt_embeds", "data"])
async def test_base64_counts_by_length(envoy: EnvoySide, services: Services, field: str) -> None:
    path = "/v1/completions" if field == "prompt_embeds" else "/pooling"
    few, many = [
        (await profile_of(envoy, services, path, {field: "AAAA" * 2**18 * size}))[0].prompt_tokens
        for size in (1, 4)
    ]
    assert 0 < few < many < 10_000
