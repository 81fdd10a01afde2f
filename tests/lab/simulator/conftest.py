from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession

from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import start

SETTINGS = ReplicaSettings(
    model="tiny",
    profile="llama-8b-h100",
    speed=20,
    max_model_len=4096,
    enable_prompt_tokens_details=True,
)


@pytest.fixture
def replica(request: pytest.FixtureRequest) -> Replica:
    return Replica(getattr(request, "param", SETTINGS))


@pytest.fixture
async def url(replica: Replica) -> AsyncIterator[str]:
    runner, port, _ = await start(replica, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{port}"
    await runner.cleanup()


@pytest.fixture
async def client(url: str) -> AsyncIterator[ClientSession]:
    async with ClientSession(url) as session:
        yield session
