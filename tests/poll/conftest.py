"""A replica whose answers a test chooses, a poller that scrapes it, and an API server."""

import gc
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from extproc.poll import reflector
from tests.conftest import RedisServer
from tests.kubernetes_api import ApiServer, enter_pod
from tests.poll.polling import PolledView, config, watching
from tests.poll.replica import ScriptedReplica, serving

Watch = Callable[..., AbstractAsyncContextManager[PolledView]]


@pytest.fixture
async def replica() -> AsyncIterator[ScriptedReplica]:
    async with serving() as replica:
        yield replica


@pytest.fixture
def watch(redis_server: RedisServer) -> Watch:
    """Polls replicas with these settings; yields a router's view of them."""
    return lambda *replicas, **settings: watching(config(redis_server, *replicas, **settings))


@pytest.fixture
async def router(watch: Watch, replica: ScriptedReplica) -> AsyncIterator[PolledView]:
    """View of a router whose poller scrapes the replica."""
    async with watch(replica) as router:
        yield router


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    monkeypatch.setattr(reflector, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(reflector, "_LONGEST_WAIT_S", 0.02)
    monkeypatch.setattr(reflector, "_WATCH_S", 600)  # no watch ends by itself
    server = ApiServer(tmp_path)
    enter_pod(server, monkeypatch)
    await server.start()
    yield server
    await server.stop()
    with warnings.catch_warnings():  # httpcore2 leaves a cancelled handshake open
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
