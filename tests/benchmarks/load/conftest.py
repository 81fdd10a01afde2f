from collections.abc import AsyncIterator

import pytest

from extproc.simulator.replica import Replica, ReplicaSettings
from extproc.simulator.server import start


@pytest.fixture
async def replica_url() -> AsyncIterator[str]:
    """A simulated replica, in this process."""
    settings = ReplicaSettings(profile="llama-8b-h100", speed=50, max_model_len=131_072)
    serving = await start(Replica(settings), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{serving.port}"
    await serving.runner.cleanup()
