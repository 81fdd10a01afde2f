from collections.abc import AsyncIterator

import pytest

from tests.conftest import RedisServer
from tests.poll.polling import Seen, config, watching
from tests.poll.replica import Replica, serving


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with serving() as replica:
        yield replica


@pytest.fixture
async def seen(redis_server: RedisServer, replica: Replica) -> AsyncIterator[Seen]:
    """States of the replica, which a poller scrapes."""
    async with watching(config(redis_server, replica)) as seen:
        yield seen
