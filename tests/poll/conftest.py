"""A replica whose answers a test chooses, and a poller that scrapes it."""

from collections.abc import AsyncIterator

import pytest

from tests.conftest import RedisServer
from tests.poll.polling import RouterView, config, watching
from tests.poll.replica import Replica, serving


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with serving() as replica:
        yield replica


@pytest.fixture
async def router(redis_server: RedisServer, replica: Replica) -> AsyncIterator[RouterView]:
    """View of a router whose poller scrapes the replica."""
    async with watching(config(redis_server, replica)) as router:
        yield router
