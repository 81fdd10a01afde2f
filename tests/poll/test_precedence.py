"""Whether a replica goes by priority is found out, by requests that it hardly notices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from aiohttp import web

from extproc.lab.simulator.replica import Replica, ReplicaSettings
from extproc.lab.simulator.server import start
from extproc.poll.precedence import goes_by_priority
from extproc.poll.scrape import ScrapeError, open_session
from tests.poll.replica import Handler, serving, text
from tests.waiting import PATIENCE_S, until

COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def simulated(policy: str) -> AsyncIterator[tuple[Replica, str]]:
    replica = Replica(ReplicaSettings(profile="llama-8b-a10", scheduling_policy=policy))
    runner, port, _ = await start(replica, "127.0.0.1", 0)
    yield replica, f"127.0.0.1:{port}"
    await runner.cleanup()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_it_is_seen_in_what_the_replica_does(policy: str) -> None:
    async with simulated(policy) as (replica, address), open_session(5) as session:
        found = await goes_by_priority(session, address, replica.settings.model)
        assert found is (policy == "priority")
        assert replica.engine.counters.finished.total() == 0, "nobody waited for an end"


async def test_where_the_order_is_by_chance_nothing_is_found() -> None:
    """Of two that wait one has its first token when the other has had it, and the client left."""
    draws, turns = Random(1), dict[int, asyncio.Event]()

    async def answer(request: web.Request) -> web.StreamResponse:
        priority, other = (await request.json())["priority"], None
        if priority:
            turn = turns[priority] = asyncio.Event()
            if len(turns) == 2:
                turns[draws.choice((-1, 1))].set()
            await turn.wait()
            other = turns.pop(-priority, None)
            turns.clear()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}")
        await until(lambda: request.transport is None)
        if other is not None:
            other.set()
        return response

    async with serving() as replica, open_session(PATIENCE_S) as session:
        replica.answers[COMPLETIONS] = answer
        for _ in range(5):
            assert not await goes_by_priority(session, replica.id, "tiny")


@pytest.mark.parametrize("answer", [text("", 401), text("", 404)])
async def test_one_that_refuses_is_an_error(answer: Handler) -> None:
    async with serving() as replica, open_session(5) as session:
        replica.answers[COMPLETIONS] = answer
        with pytest.raises(ScrapeError, match=COMPLETIONS):
            await goes_by_priority(session, replica.id, "tiny")
