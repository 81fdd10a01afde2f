"""A host name of Redis that does not resolve in time."""

import asyncio
import socket
import time
from typing import Any, NoReturn

import pytest
import uvloop
from redis.exceptions import RedisError

from extproc.share import connection
from extproc.share.connection import connect, in_time
from tests.waiting import until

NAME = "redis.test"


def test_failed_lookup_after_the_time_limit_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The resolver takes longer than the limit, in the event loop that routers use."""
    looked_up, reports = list[str](), list[dict[str, Any]]()

    def getaddrinfo(host: str, *_: object, **__: object) -> NoReturn:
        time.sleep(3 * connection.TIMEOUT_S)
        looked_up.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async def connect_in_vain() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reports.append(context))
        async with connect(f"redis://{NAME}:1/0", "default") as redis:
            with pytest.raises((RedisError, TimeoutError)):
                await in_time(redis.ping())
        await until(lambda: looked_up)
        await asyncio.sleep(0.01)  # a report would be made in the next round of the loop

    monkeypatch.setattr(connection, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    uvloop.run(connect_in_vain())
    assert looked_up == [NAME]
    assert not reports
