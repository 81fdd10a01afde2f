"""Fixtures of all tests: captured logs, and a real Redis."""

import asyncio
import gc
import logging
import os
import resource
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from extproc.cli import main
from extproc.lab.harness.processes import Process, free_port, start_redis
from extproc.share import connection, reader
from extproc.share.connection import connect
from tests.fakes import ManualClock
from tests.waiting import PATIENCE_S

# Tests with gRPC threads start processes: gRPC's own handlers around a fork may abort the child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# No test trusts the system's authorities; each process that imports aiohttp would read them all.
# This authority has signed nothing, but httpx refuses an empty file.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("data") / "authority.pem")

# A busy machine may take long for an example.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("tests"), max_examples=20)
settings.load_profile("tests")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers per core, because tests with processes mostly wait, else one; at most 16."""
    cores = len(os.sched_getaffinity(0))
    return min(cores if config.option.markexpr else 2 * cores, 16)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from scanning modules and tests, which are never garbage: that
    would take a third of pytest's collection, and more time in every later scan."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs slow files first, so that no worker starts a slow file at the end."""
    slow = {item.path for item in items if any(map(item.get_closest_marker, ("process", "slow")))}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _logging_of_commands_ends() -> Iterator[None]:
    """Undoes the logging that a command sets up: its level would hide later log lines, and its
    handler writes to a stderr that is closed after the test."""
    root, package = logging.getLogger(), logging.getLogger("extproc")
    levels = root.level, package.level
    yield
    for logger, level in zip((root, package), levels, strict=True):
        logger.setLevel(level)
    for handler in [*root.handlers]:
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


class Logged(logging.Handler):
    """Log lines of the package, which tests inspect or wait for."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: list[logging.LogRecord] = []
        self._added = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        assert not record.exc_info, "an expected failure is logged without a traceback"
        self._records.append(record)
        self._added.set()

    def lines(self, message: str = "") -> list[dict[str, object]]:
        """Returns the fields of the lines with this message; empty: of all lines."""
        return [vars(line) for line in self._records if message in ("", line.getMessage())]

    async def line(self, message: str, times: int = 1) -> dict[str, object]:
        """Waits until the message was logged ``times`` times; returns the first line's fields."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.lines(message)) < times:
                self._added.clear()
                await self._added.wait()
        return self.lines(message)[0]


@contextmanager
def too_many_open_files() -> Iterator[None]:
    """Makes every opening of a file fail within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


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


Cli = Callable[..., tuple[list[str], list[str]]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs ``extproc ARGUMENTS``, which must end with this status; returns the lines of stdout and
    stderr."""

    def run(*arguments: str | Path, status: int = 0) -> tuple[list[str], list[str]]:
        capsys.readouterr()
        try:
            ended: int | str | None = main([*map(str, arguments)])
        except SystemExit as exited:
            ended = exited.code
        assert ended == status
        output = capsys.readouterr()
        return output.out.splitlines(), output.err.splitlines()

    return run


class RedisServer:
    """A real Redis on its own port; tests may kill it and start it again, empty."""

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
    """Sets how long this process waits for an answer of Redis."""
    for module in (connection, reader):
        monkeypatch.setattr(module, "TIMEOUT_S", seconds)
    monkeypatch.setitem(connection._ONCE, "socket_connect_timeout", seconds)


@pytest.fixture
async def stopped_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RedisServer]:
    """A Redis that is not started yet; clients wait long enough for a busy machine."""
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
