"""``/readyz`` fails without Redis, ``/livez`` once heartbeats have ended."""

from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from extproc.poll.into_redis import Health
from extproc.share.assignment import Assigner
from tests.conftest import Logged, RedisServer
from tests.fakes import ManualClock
from tests.poll.polling import config, polling, read
from tests.poll.replica import serving
from tests.poll.test_discovery import FILE_BROKEN
from tests.waiting import until_read

pytestmark = pytest.mark.process


async def test_poller_without_redis_is_not_ready(redis_server: RedisServer, logged: Logged) -> None:
    async with serving() as replica:
        settings = config(redis_server, replica, pools={"second": {"replicas": []}})
        ready = partial(read, settings, "/readyz")
        ok = 200, "ok\n"
        lost = 503, "pool default: redis is lost; pool second: redis is lost\n"
        async with polling(settings):
            await logged.line("poller started")
            await until_read(ready, lambda now: now == ok)
            await redis_server.kill()
            await until_read(ready, lambda now: now == lost)
            assert await read(settings, "/livez") == await read(settings, "/healthz") == ok
            await redis_server.start()
            await until_read(ready, lambda now: now == ok)


async def test_poller_is_not_ready_until_it_has_read_its_replicas_file(
    redis_server: RedisServer, logged: Logged, tmp_path: Path
) -> None:
    """A rollout with a broken file must not replace pollers that poll."""
    file = tmp_path / "replicas.yaml"
    settings = config(redis_server, replicas_file=str(file))
    ready = partial(read, settings, "/readyz")
    never = 503, f"pool default: {file} was never read: see the log\n"
    ok = 200, "ok\n"
    async with polling(settings):
        await logged.line("poller started")
        await until_read(ready, lambda now: now == never)
        file.write_text("[]")
        await until_read(ready, lambda now: now == ok)
        file.unlink()
        await logged.line(FILE_BROKEN, 2)
        assert await ready() == ok


async def test_poller_whose_heartbeats_have_ended_is_not_live(redis_client: Redis) -> None:
    clock = ManualClock()
    health = Health(clock)
    assigner = Assigner(redis_client, "one", "poller", clock)
    health.add("one", assigner, list)
    clock.advance(60)
    assert (health.live(), health.ready()) == ("", "pool one: no heartbeat yet")
    await assigner.beat(["10.0.0.1:8000"])
    assert (health.live(), health.ready()) == ("", "")
    clock.advance(12)
    assert health.live() == health.ready() == "pool one: no heartbeat for 12 s"
    await assigner.beat(["10.0.0.1:8000"])
    assert (health.live(), health.ready()) == ("", "")
