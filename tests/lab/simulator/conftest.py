"""A simulated replica, a client of its server, and requests with JSON bodies."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator import OUTPUT_TOKENS_HEADER
from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import serving

SETTINGS = ReplicaSettings(
    model="tiny",
    profile="llama-8b-h100",
    speed=20,
    max_model_len=4096,
    enable_prompt_tokens_details=True,
)
CHAT = "/v1/chat/completions"


@pytest.fixture
def replica(request: pytest.FixtureRequest) -> Replica:
    return Replica(getattr(request, "param", SETTINGS))


@pytest.fixture
async def url(replica: Replica) -> AsyncIterator[str]:
    async with serving(replica, "127.0.0.1", 0) as (port, _):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def client(url: str) -> AsyncIterator[ClientSession]:
    async with ClientSession(url) as session:
        yield session


def chat(text: str = "hello there", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


async def get(client: ClientSession, path: str, status: int = 200) -> Any:
    async with client.get(path) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def reply(
    client: ClientSession,
    path: str,
    body: dict[str, Any],
    output_tokens: int | None = None,
    status: int = 200,
) -> dict[str, Any]:
    headers = {OUTPUT_TOKENS_HEADER: str(output_tokens)} if output_tokens else {}
    async with client.post(path, json=body, headers=headers) as response:
        assert response.status == status, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer
