import asyncio
import logging
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis

from extproc.lab.harness.processes import Process, free_port, start_redis
from extproc.share import connection, reader
from extproc.share.connection import connect
from tests.waiting import PATIENCE_S

# Tests with gRPC threads start processes: gRPC's own handlers around a fork may abort the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# How long an example takes is up to who else runs on this machine.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_xdist_auto_num_workers() -> int:
    """Tests with real processes wait more than they compute; their files keep 16 busy."""
    return min(2 * len(os.sched_getaffinity(0)), 16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first: at the end no worker is left with one of them."""
    slow = {
        item.path
        for item in items
        if item.get_closest_marker("process") or item.path.parent.name in ("benchmarks", "replay")
    }
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _log_handlers_end() -> Iterator[None]:
    """A command's handler writes to the stderr of its test, which is closed after it."""
    yield
    root = logging.getLogger()
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler]:
        root.removeHandler(handler)


class Logged(logging.Handler):
    """What the package logs, to be looked at or waited for."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: list[logging.LogRecord] = []
        self._more = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        assert not record.exc_info, "an expected failure is logged without a traceback"
        self._records.append(record)
        self._more.set()

    def lines(self, message: str = "") -> list[dict[str, object]]:
        """Fields of the lines with this message; of all lines without one."""
        return [vars(line) for line in self._records if message in ("", line.getMessage())]

    async def line(self, message: str, times: int = 1) -> dict[str, object]:
        """Wait until this message was logged so many times; returns the first."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.lines(message)) < times:
                self._more.clear()
                await self._more.wait()
        return self.lines(message)[0]


@contextmanager
def too_many_open_files() -> Iterator[None]:
    """Within the block this process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def logged() -> Iterator[Logged]:
    handler = Logged()
    package = logging.getLogger("extproc")
    level = package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    yield handler
    package.removeHandler(handler)
    package.setLevel(level)


class RedisServer:
    """A real Redis on a port of its own, which tests may kill and start again, empty."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: Process | None = None
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        self._process = await start_redis(self._directory, self.port)

    async def kill(self) -> None:
        if self._process is not None:
            await self._process.kill()


def wait_for_redis(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long this process waits for an answer of Redis before it is lost."""
    for module in (connection, reader):
        monkeypatch.setattr(module, "TIMEOUT_S", seconds)
    monkeypatch.setitem(connection._ONCE, "socket_connect_timeout", seconds)


@pytest.fixture
async def stopped_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RedisServer]:
    """A Redis that is not started yet; that a machine is busy is no reason to take it for lost."""
    wait_for_redis(monkeypatch, 10.0)
    server = RedisServer(tmp_path / "redis")
    yield server
    await server.kill()


@pytest.fixture
async def redis_server(stopped_redis: RedisServer) -> RedisServer:
    await stopped_redis.start()
    return stopped_redis


@pytest.fixture
async def redis_client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    async with connect(redis_server.url, "test") as client:
        yield client
