"""Every file in envoy/ routes requests, with no change but the ports."""

import asyncio
import io
import json
from functools import partial
from typing import Any

import openai
import pytest
import pytest_asyncio

from extproc.lab.harness.envoy_config import Bootstrap
from extproc.lab.harness.stack import MODEL
from extproc.request.endpoint import PATHS
from tests.e2e.client import CHAT, IN_TURN, MESSAGES, EnvoyClient
from tests.e2e.stack import FAST_AND_SLOW, SETTINGS, TRANSLATED, Behind, EdsStack, here
from tests.envoy.test_envoy import around_the_fragment
from tests.waiting import until, until_read

EXAMPLES: dict[str, dict[str, object]] = {
    "envoy": {},
    "ext_proc": {},
    "endpoint_picker": {"second_choice": True},
    "original_dst": {"second_choice": False},
    "api_only": {},
}
"""Each file, and the router's ``serve`` settings that it needs."""
NO_FALLBACK = {"original_dst"}


class Examples(EdsStack, Behind):
    """A stack behind each file in turn; Envoy Gateway's and Istio's files are translated."""

    name = "envoy"

    def _configuration(self) -> dict[str, Any]:
        whole = super()._configuration()
        return {**whole, "serve": whole["serve"] | EXAMPLES.get(self.name, {})}

    def _shipped(self) -> Bootstrap:
        if self.name == "ext_proc":  # a fragment
            ports, replicas = self.ports, [self.address(replica.name) for replica in FAST_AND_SLOW]
            return around_the_fragment(
                ports["envoy"], ports["envoy-admin"], self.address("router"), replicas
            )
        return Behind._shipped(self)


system = partial(Examples, replicas=here(FAST_AND_SLOW), settings=SETTINGS)


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[*EXAMPLES, "eds", *TRANSLATED]
)
async def stack(request: pytest.FixtureRequest, running: Examples) -> Examples:
    await running.behind(request.param)
    return running


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def router_runs(stack: Examples) -> None:
    if not stack.process("router").running:
        await stack.start("router")
        await stack.wait_routing()


async def test_fast_replica_is_preferred_and_serves(client: EnvoyClient) -> None:
    async def preferred() -> bool:
        answers = await asyncio.gather(*(client.chat(tokens=5) for _ in range(4)))
        return {answer.decision["replica_name"] for answer in answers} == {"one"}

    await until(preferred)
    for _ in range(3):
        answer = await client.chat(tokens=5)
        assert answer.decision["outcome"]["served_by"] == answer.decision["replica"]
        assert answer.decision["outcome"]["output_tokens"] == 5


async def test_client_cannot_choose_engine_of_replica(client: EnvoyClient) -> None:
    """vLLM answers 400 if the header names an engine that it lacks."""
    await client.chat(tokens=1, headers={"X-Data-Parallel-Rank": "7"})


async def test_envoy_follows_choice_to_each_replica(client: EnvoyClient, stack: Examples) -> None:
    """A destination that the client names has no effect."""
    forged = {"x-gateway-destination-endpoint": stack.address("one")}
    answers = [await client.chat(tokens=5, headers=IN_TURN | forged) for _ in range(8)]
    decisions = [answer.decision for answer in answers]
    assert all(decision["outcome"]["served_by"] == decision["replica"] for decision in decisions)
    assert {decision["replica"] for decision in decisions} == {
        stack.address("one"),
        stack.address("two"),
    }


async def test_openai_client_gets_whole_and_streamed_answers(stack: Examples) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as sdk:
        whole = await sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 5
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=5, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == whole.choices[0].message.content


async def test_paths_without_inference_are_answered(client: EnvoyClient, stack: Examples) -> None:
    tokenize = {"model": MODEL, "prompt": "of the sea"}
    for method, path, body, part in (
        ("GET", "/v1/models", None, MODEL),
        ("GET", "/health", None, ""),
        ("POST", "/tokenize", tokenize, "tokens"),
    ):
        status = 503 if stack.name in NO_FALLBACK else 200
        if stack.name == "api_only" and path != "/v1/models":
            status = 404
        answer = await client.request(method, path, body, status=status)
        assert part.encode() in answer.body or status != 200


GET_HIDDEN = "/metrics", "/metrics/v1/models", "/metrics/v1/responses/resp_1"
POST_HIDDEN = (
    *("/v1/load_lora_adapter", "/sleep", "/inference/v1/abort_requests", "/v1/responses/render"),
    *("/x" + CHAT, CHAT.replace("t/c", "t%2Fc")),
)
HIDDEN = [*(("GET", path) for path in GET_HIDDEN), *(("POST", path) for path in POST_HIDDEN)]


@pytest.mark.parametrize("stack", ["api_only"], indirect=True)
async def test_api_only_hides_other_paths(client: EnvoyClient) -> None:
    for method, path in HIDDEN:
        body = {"model": MODEL, "messages": MESSAGES}
        answer = await client.request(method, path, body, status=404)
        assert "x-served-by" not in answer.headers, path
    assert "x-served-by" in (await client.chat(tokens=1)).headers


@pytest.mark.parametrize("stack", ["api_only"], indirect=True)
async def test_api_only_passes_every_path_of_api(client: EnvoyClient) -> None:
    """A response of the replica has a body; a 404 of Envoy has none."""
    hidden = {"/tokenize", "/detokenize"}
    for path in (*PATHS.keys() - hidden, "/v1/responses/resp_1/cancel", "/v1/models"):
        answer = await client.request("POST", path, {}, status=None)
        assert answer.body, path


async def test_body_of_32_mb_arrives_whole(client: EnvoyClient, stack: Examples) -> None:
    """The replica parses the body and counts the prompt, so a lost byte would be an error."""
    words = "sea " * (8 * 2**20)
    body = {"model": MODEL, "prompt": words, "max_tokens": 1, "truncate_prompt_tokens": 100}
    answer = await client.request(
        "POST",
        "/v1/completions",
        io.BytesIO(json.dumps(body).encode()),
        {"content-type": "application/json"},
        status=None,
    )
    assert answer.status in (200, 400), answer.body[:300]
    assert b"JSON" not in answer.body, answer.body[:300]


async def test_forged_destination_has_no_effect_without_router(
    client: EnvoyClient, stack: Examples
) -> None:
    forged = {
        "x-gateway-destination-endpoint": stack.address("router-admin"),
        "x-gateway-destination-endpoint-subset": stack.address("router-admin"),
    }
    await stack.kill("router")
    for _ in range(4):
        status = 503 if stack.name in NO_FALLBACK else 200
        answer = await client.request("GET", "/v1/models", headers=forged, status=status)
        assert MODEL.encode() in answer.body or status != 200


async def test_router_that_starts_after_envoy_is_asked(
    client: EnvoyClient, stack: Examples
) -> None:
    """By default, Envoy repeats a health check that fails before the first request only after 60 s.
    Envoy Gateway tells Envoy the pods of routers before they are ready."""
    await stack.kill("router")
    await stack.stop("envoy")
    await stack.start("envoy")
    await stack.start("router")
    async with asyncio.timeout(30):
        await until_read(lambda: client.chat(tokens=1, status=None), lambda now: now.decisions)
